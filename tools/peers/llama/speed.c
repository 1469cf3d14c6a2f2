// The speed of llama.cpp: a prompt in one batch, then greedy tokens one by one. Prints one JSON object.
//
// speed MODEL.gguf TOKENS NEW THREADS, where the file TOKENS holds the prompt's token ids as text.
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static llama_token largest(const float * logits, int32_t count) {
    int32_t best = 0;
    for (int32_t i = 1; i < count; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static int fail(const char * what) {
    fprintf(stderr, "error: %s\n", what);
    return 2;
}

int main(int argc, char ** argv) {
    if (argc != 5) return fail("usage: speed MODEL.gguf TOKENS NEW THREADS");
    const int new_tokens = atoi(argv[3]), threads = atoi(argv[4]);
    static llama_token prompt[1 << 16];
    int32_t count = 0;
    FILE * file = fopen(argv[2], "r");
    if (!file) return fail("the file of tokens cannot be opened");
    while (count < 1 << 16 && fscanf(file, "%d", &prompt[count]) == 1) count++;
    fclose(file);
    if (count < 1 || new_tokens < 2 || threads < 1) return fail("expected a prompt, 2 new tokens, 1 thread");

    llama_log_set(quiet, NULL);
    const double begun = now();
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return fail("the model cannot be loaded");
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(count + new_tokens);
    params.n_batch = (uint32_t)count;
    params.n_ubatch = (uint32_t)count;
    params.n_threads = threads;
    params.n_threads_batch = threads;
    struct llama_context * context = llama_init_from_model(model, params);
    if (!context) return fail("no context");
    const int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const double loaded = now();

    if (llama_decode(context, llama_batch_get_one(prompt, count))) return fail("the prompt");
    llama_token token = largest(llama_get_logits_ith(context, -1), vocab);
    const double first = now();
    printf("{\"tokens\": [%d", token);
    for (int i = 1; i < new_tokens; i++) {
        if (llama_decode(context, llama_batch_get_one(&token, 1))) return fail("a token");
        token = largest(llama_get_logits_ith(context, -1), vocab);
        printf(", %d", token);
    }
    const double done = now();
    printf("], \"load_seconds\": %.6f, \"first_token_seconds\": %.6f, \"tokens_per_second\": %.4f}\n",
           loaded - begun, first - loaded, (new_tokens - 1) / (done - first));
    llama_free(context);
    llama_model_free(model);
    return 0;
}
