// What the benchmark asks of ggml: a product and a Mixture-of-Experts layer, as graphs that can be run
// again and again. Everything is created once and freed together. A type of weights is ggml's number.
//
// A function that fails returns NULL or -1, with nothing left behind.

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

enum { GRAPH_NODES = 512 };

struct peer {
    ggml_backend_t backend;
    struct ggml_threadpool *threads;
    ggml_backend_buffer_type_t buffer;
    struct ggml_context *context;  // of the weights and inputs
    ggml_backend_buffer_t weights;
    struct ggml_context *inputs_context;
    ggml_backend_buffer_t inputs;
    struct ggml_context *graph_context;
    ggml_gallocr_t allocator;
    struct ggml_tensor *x, *ids, *router_weights, **matrices;
    struct ggml_cgraph **graphs;
    int graph_count, matrix_count;
};

void peer_free(struct peer *p) {
    if (p == NULL) return;
    if (p->allocator) ggml_gallocr_free(p->allocator);
    if (p->inputs) ggml_backend_buffer_free(p->inputs);
    if (p->weights) ggml_backend_buffer_free(p->weights);
    if (p->graph_context) ggml_free(p->graph_context);
    if (p->inputs_context) ggml_free(p->inputs_context);
    if (p->context) ggml_free(p->context);
    if (p->backend) ggml_backend_free(p->backend);
    if (p->threads) ggml_threadpool_free(p->threads);
    free(p->matrices);
    free(p->graphs);
    free(p);
}

// The buffer type of this name. All but "CPU" rearrange weights for the CPU's instructions.
static ggml_backend_buffer_type_t named(const char *name) {
    if (strcmp(name, "CPU") == 0) return ggml_backend_cpu_buffer_type();
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == NULL) return NULL;
    ggml_backend_dev_get_extra_bufts_t list =
        (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *type = list ? list(cpu) : NULL; type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), name) == 0) return *type;
    }
    return NULL;
}

static struct ggml_context *described(size_t tensors, size_t graphs) {
    size_t size = (tensors + 8) * ggml_tensor_overhead() +
                  graphs * ggml_graph_overhead_custom(GRAPH_NODES, false);
    struct ggml_init_params params = {.mem_size = size, .mem_buffer = NULL, .no_alloc = true};
    return ggml_init(params);
}

// ggml says of every matrix that it is repacked: errors alone are of interest.
static void errors_only(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

// A thread on each of `cpus`, the calling thread on the last; none pinned where `cpus` is NULL.
static struct peer *peer_new(int threads, const int *cpus, const char *buffer, int matrices,
                             int graphs) {
    struct peer *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    ggml_log_set(errors_only, NULL);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    for (int i = 0; cpus && i < threads; ++i) {
        if (cpus[i] >= 0 && cpus[i] < GGML_MAX_N_THREADS) params.cpumask[cpus[i]] = true;
    }
    params.strict_cpu = cpus != NULL;
    p->matrix_count = matrices;
    p->graph_count = graphs;
    p->matrices = calloc(matrices, sizeof *p->matrices);
    p->graphs = calloc(graphs, sizeof *p->graphs);
    p->buffer = named(buffer);
    p->backend = ggml_backend_cpu_init();
    p->threads = ggml_threadpool_new(&params);
    p->context = described(matrices, 0);
    p->inputs_context = described(3, 0);
    p->graph_context = described(64 * (size_t)graphs, graphs);
    p->allocator = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    bool whole = p->matrices && p->graphs && p->buffer && p->backend && p->threads && p->context &&
                 p->inputs_context && p->graph_context && p->allocator;
    if (!whole) {
        peer_free(p);
        return NULL;
    }
    ggml_backend_cpu_set_n_threads(p->backend, threads);
    ggml_backend_cpu_set_threadpool(p->backend, p->threads);
    return p;
}

// Memory for the matrices and inputs that have been described. Whether there was enough.
static bool allocate(struct peer *p) {
    p->weights = ggml_backend_alloc_ctx_tensors_from_buft(p->context, p->buffer);
    p->inputs = ggml_backend_alloc_ctx_tensors_from_buft(p->inputs_context,
                                                         ggml_backend_cpu_buffer_type());
    return p->weights != NULL && p->inputs != NULL;
}

static void graph(struct peer *p, int at, struct ggml_tensor *result) {
    p->graphs[at] = ggml_new_graph_custom(p->graph_context, GRAPH_NODES, false);
    ggml_set_output(result);
    ggml_build_forward_expand(p->graphs[at], result);
}

static struct ggml_tensor *result(const struct peer *p, int at) {
    return ggml_graph_node(p->graphs[at], -1);
}

// Plans the graphs' memory, which they share: they are alike, and one runs at a time. NULL when
// there is not enough.
static struct peer *planned(struct peer *p) {
    for (int i = 0; i < p->graph_count; ++i) {
        bool there = ggml_gallocr_alloc_graph(p->allocator, p->graphs[i]);
        // Were it not one memory, planning this graph would have moved the earlier ones'.
        if (!there || result(p, i)->data != result(p, 0)->data) {
            peer_free(p);
            return NULL;
        }
    }
    return p;
}

// `copies` matrices [K, N], one graph for each, by `tokens` rows.
struct peer *peer_dense(int threads, const int *cpus, const char *buffer, int type, int64_t k,
                        int64_t n, int copies, int64_t tokens) {
    struct peer *p = peer_new(threads, cpus, buffer, copies, copies);
    if (p == NULL) return NULL;
    p->x = ggml_new_tensor_2d(p->inputs_context, GGML_TYPE_F32, k, tokens);
    for (int i = 0; i < copies; ++i) {
        p->matrices[i] = ggml_new_tensor_2d(p->context, (enum ggml_type)type, k, n);
    }
    if (!allocate(p)) {
        peer_free(p);
        return NULL;
    }
    for (int i = 0; i < copies; ++i) {
        graph(p, i, ggml_mul_mat(p->graph_context, p->matrices[i], p->x));
    }
    return planned(p);
}

// One layer: matrix 0 is gate and up [H, 2I] of every expert, matrix 1 down [I, H]. MXFP4 has gpt-oss's
// activation and one matrix each for gate, up and down, as llama.cpp has them.
struct peer *peer_moe(int threads, const int *cpus, const char *buffer, int type, int64_t experts,
                      int64_t top_k, int64_t h, int64_t inner, int64_t tokens) {
    bool oai = type == GGML_TYPE_MXFP4;
    struct peer *p = peer_new(threads, cpus, buffer, oai ? 3 : 2, 1);
    if (p == NULL) return NULL;
    p->x = ggml_new_tensor_3d(p->inputs_context, GGML_TYPE_F32, h, 1, tokens);
    p->ids = ggml_new_tensor_2d(p->inputs_context, GGML_TYPE_I32, top_k, tokens);
    p->router_weights = ggml_new_tensor_3d(p->inputs_context, GGML_TYPE_F32, 1, top_k, tokens);
    int last = p->matrix_count - 1;
    for (int i = 0; i < last; ++i) {
        p->matrices[i] = ggml_new_tensor_3d(p->context, (enum ggml_type)type, h,
                                            oai ? inner : 2 * inner, experts);
    }
    p->matrices[last] = ggml_new_tensor_3d(p->context, (enum ggml_type)type, inner, h, experts);
    if (!allocate(p)) {
        peer_free(p);
        return NULL;
    }
    struct ggml_context *c = p->graph_context;
    struct ggml_tensor *gate = ggml_mul_mat_id(c, p->matrices[0], p->x, p->ids), *activated;
    if (oai) {
        struct ggml_tensor *up = ggml_mul_mat_id(c, p->matrices[1], p->x, p->ids);
        activated = ggml_swiglu_oai(c, gate, up, 1.702f, 7.0f);
    } else {
        activated = ggml_swiglu(c, gate);
    }
    struct ggml_tensor *down = ggml_mul_mat_id(c, p->matrices[last], activated, p->ids);
    struct ggml_tensor *weighted = ggml_mul(c, down, p->router_weights), *sum = NULL;
    for (int64_t j = 0; j < top_k; ++j) {
        struct ggml_tensor *rows = ggml_view_2d(c, weighted, h, tokens, weighted->nb[2],
                                                (size_t)j * weighted->nb[1]);
        sum = sum ? ggml_add(c, sum, rows) : rows;
    }
    // With one expert per token the sum is a view, which is no result.
    graph(p, 0, top_k == 1 ? ggml_cont(c, sum) : sum);
    return planned(p);
}

// Bytes of a row of k weights; 0 for a type that has no whole blocks of it.
size_t peer_row_bytes(int type, int64_t k) {
    return k % ggml_blck_size((enum ggml_type)type) ? 0 : ggml_row_size((enum ggml_type)type, k);
}

// Quantizes rows of k weights.
void peer_quantize(int type, const float *rows, void *blocks, int64_t count, int64_t k) {
    ggml_quantize_chunk((enum ggml_type)type, rows, blocks, 0, count, k, NULL);
}

// Bytes of a matrix before it is repacked.
size_t peer_matrix_bytes(const struct peer *p, int matrix) {
    return ggml_nbytes(p->matrices[matrix]);
}

// Stores a matrix of [.., N, K / block] blocks, rearranged as its buffer type has it.
void peer_set_matrix(struct peer *p, int matrix, const void *blocks) {
    ggml_backend_tensor_set(p->matrices[matrix], blocks, 0, peer_matrix_bytes(p, matrix));
}

void peer_set_x(struct peer *p, const float *x) {
    ggml_backend_tensor_set(p->x, x, 0, ggml_nbytes(p->x));
}

void peer_set_routing(struct peer *p, const int32_t *ids, const float *weights) {
    ggml_backend_tensor_set(p->ids, ids, 0, ggml_nbytes(p->ids));
    ggml_backend_tensor_set(p->router_weights, weights, 0, ggml_nbytes(p->router_weights));
}

int peer_run(struct peer *p, int at) {
    return ggml_backend_graph_compute(p->backend, p->graphs[at]) == GGML_STATUS_SUCCESS ? 0 : -1;
}

// Values of the result.
size_t peer_out_len(const struct peer *p, int at) {
    return (size_t)ggml_nelements(result(p, at));
}

void peer_get_out(struct peer *p, int at, float *out) {
    ggml_backend_tensor_get(result(p, at), out, 0, ggml_nbytes(result(p, at)));
}

// Idle threads look for work for a long time: not while others are timed.
void peer_pause(struct peer *p) { ggml_threadpool_pause(p->threads); }
void peer_resume(struct peer *p) { ggml_threadpool_resume(p->threads); }
