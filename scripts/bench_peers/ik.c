// Times ik_llama.cpp's products and layers with 4-bit weights: ik THREADS SHAPE TOKENS [SECONDS]. SHAPE is
// KxN, or experts x experts per token x H x I. Prints one line for each type of weights, as stored and repacked.
//
// Built with ik_llama.cpp's ggml (its own types and operations); `peers` builds other versions in.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml.h"

void iqk_repack_tensor(struct ggml_tensor *tensor);

enum { TILE = 256, COLD = 512 << 20 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static unsigned state = 1;
static float draw(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1;
}

// 256 columns of random weights, repeated.
static void fill(struct ggml_tensor *t) {
    int64_t k = t->ne[0], rows = t->ne[1] * t->ne[2];
    size_t row = ggml_row_size(t->type, k);
    float *values = malloc(sizeof(float) * k * TILE);
    for (int64_t i = 0; i < k * TILE; ++i) values[i] = draw() / 32;
    char *blocks = malloc(row * TILE);
    ggml_quantize_chunk(t->type, values, blocks, 0, TILE, k, NULL, NULL);
    for (int64_t r = 0; r < rows; ++r) memcpy((char *)t->data + r * row, blocks + r % TILE * row, row);
    free(values);
    free(blocks);
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: ik THREADS SHAPE TOKENS [SECONDS]\n"), 2;
    int threads = atoi(argv[1]), tokens = atoi(argv[3]);
    double limit = argc > 4 ? atof(argv[4]) : 1;
    long s[4];
    int dims = sscanf(argv[2], "%ldx%ldx%ldx%ld", s, s + 1, s + 2, s + 3), moe = dims == 4;
    if (dims != 2 && !moe) return fprintf(stderr, "%s: not a shape\n", argv[2]), 2;
    const struct { const char *name; enum ggml_type type; int repack; } kinds[] = {
        {"Q4_0", GGML_TYPE_Q4_0, 0}, {"Q4_0_R8", GGML_TYPE_Q4_0, 1},
        {"IQ4_XS", GGML_TYPE_IQ4_XS, 0}, {"IQ4_XS_R8", GGML_TYPE_IQ4_XS, 1},
        {"MXFP4", GGML_TYPE_MXFP4, 0}, {"MXFP4_R8", GGML_TYPE_MXFP4, 1},
    };
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; ++kind) {
        enum ggml_type type = kinds[kind].type;
        long e = moe ? s[0] : 1, top = moe ? s[1] : 1, h = moe ? s[2] : s[0], inner = moe ? s[3] : 0;
        if (h % ggml_blck_size(type) || inner % ggml_blck_size(type)) continue;
        if (moe == 0 && type == GGML_TYPE_MXFP4) continue;
        size_t bytes = ggml_row_size(type, h) * (moe ? 0 : s[1]);
        int copies = moe ? 1 : COLD / bytes + 2 < 1000 ? COLD / bytes + 2 : 1000;
        size_t weights = moe ? e * 3 * ggml_row_size(type, h) * inner : bytes * copies;
        size_t size = weights + (64u << 20) + 64ul * tokens * (h + (moe ? 3 * top * (h + inner) : s[1]));
        struct ggml_context *c = ggml_init((struct ggml_init_params){size, NULL, false});
        struct ggml_tensor *m[1024], *x, *ids = NULL, *factor = NULL;
        struct ggml_cgraph *graphs[1024];
        if (moe) {
            m[0] = ggml_new_tensor_3d(c, type, h, inner, e);
            m[1] = ggml_new_tensor_3d(c, type, h, inner, e);
            m[2] = ggml_new_tensor_3d(c, type, inner, h, e);
            x = ggml_new_tensor_3d(c, GGML_TYPE_F32, h, 1, tokens);
            ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, top, tokens);
            factor = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, top, tokens);
            for (int64_t i = 0; i < top * tokens; ++i) ((float *)factor->data)[i] = 1.0f / top;
        } else {
            for (int i = 0; i < copies; ++i) m[i] = ggml_new_tensor_2d(c, type, h, s[1]);
            x = ggml_new_tensor_2d(c, GGML_TYPE_F32, h, tokens);
        }
        for (int64_t i = 0; i < ggml_nelements(x); ++i) ((float *)x->data)[i] = draw();
        for (int i = 0; i < (moe ? 3 : copies); ++i) {
            fill(m[i]);
            if (kinds[kind].repack) iqk_repack_tensor(m[i]);
        }
        if (kinds[kind].repack && m[0]->type == type) {
            ggml_free(c);
            continue;
        }
        // A graph's results lie in the context; those of all graphs are alike and small next to the weights.
        int count = moe ? 1 : (tokens > 64 ? 4 : copies);
        struct ggml_context *g = ggml_init((struct ggml_init_params){
            (64u << 20) + (size_t)count * 8 * tokens * (moe ? top * (inner * 3 + h * 4) : s[1]), NULL, false});
        for (int i = 0; i < count; ++i) {
            struct ggml_tensor *out;
            if (moe) {
                struct ggml_tensor *a = ggml_moe_up_gate(g, m[1], m[0], x, ids, GGML_UNARY_OP_SILU);
                struct ggml_tensor *w = ggml_mul(g, ggml_mul_mat_id(g, m[2], a, ids), factor);
                out = NULL;
                for (long j = 0; j < top; ++j) {
                    struct ggml_tensor *v = ggml_view_2d(g, w, h, tokens, w->nb[2], j * w->nb[1]);
                    out = out ? ggml_add(g, out, v) : ggml_cont(g, v);
                }
            } else {
                out = ggml_mul_mat(g, m[i], x);
            }
            graphs[i] = ggml_new_graph(g);
            ggml_build_forward_expand(graphs[i], out);
        }
        struct ggml_cplan plan = ggml_graph_plan(graphs[0], threads);
        plan.work_data = aligned_alloc(64, (plan.work_size + 127) / 64 * 64);
        double best = INFINITY, start = seconds();
        int calls = 0;
        for (; calls < 4 || (seconds() - start < limit && calls < 200); ++calls) {
            for (int64_t t = 0; moe && t < tokens; ++t) {
                // Different experts of a token: an offset and an odd step, e being a power of two.
                long first = tokens == 1 ? calls * top : (long)((draw() + 1) * e);
                for (long j = 0; j < top; ++j) ((int32_t *)ids->data)[t * top + j] = (first + j * 5) % e;
                if (tokens == 1)
                    for (long j = 0; j < top; ++j) ((int32_t *)ids->data)[j] = (first + j) % e;
            }
            double at = seconds();
            ggml_graph_compute(graphs[calls % count], &plan);
            double took = seconds() - at;
            if (calls >= 2 && took < best) best = took;
        }
        printf("ik %s T %d threads %d %s: %.4f ms, %d calls\n", argv[2], tokens, threads, kinds[kind].name, best * 1e3, calls);
        fflush(stdout);
        free(plan.work_data);
        ggml_free(g);
        ggml_free(c);
    }
    return 0;
}
