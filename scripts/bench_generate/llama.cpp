// Times llama.cpp on a GGUF file: llama MODEL THREADS PROMPT NEW. Prints one JSON object.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static double seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv) {
  if (argc != 5) return fprintf(stderr, "usage: llama MODEL THREADS PROMPT NEW\n"), 2;
  const int threads = atoi(argv[2]), prompt = atoi(argv[3]), fresh = atoi(argv[4]);
  llama_log_set([](ggml_log_level level, const char *text, void *) {
    if (level >= GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
  }, nullptr);
  llama_backend_init();
  llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = prompt + fresh + 64;
  params.n_batch = params.n_ubatch = prompt;
  params.n_threads = params.n_threads_batch = threads;
  llama_context *context = llama_init_from_model(model, params);
  if (!context) return 1;
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::vector<llama_token> tokens(prompt);
  for (int i = 0; i < prompt; i++) tokens[i] = (i * 7919 + 13) % vocab;

  // The first pass reads the file; the second is timed.
  double first = 0;
  for (int pass = 0; pass < 2; pass++) {
    llama_memory_clear(llama_get_memory(context), true);
    const double start = seconds();
    if (llama_decode(context, llama_batch_get_one(tokens.data(), prompt))) return 1;
    llama_get_logits_ith(context, -1);
    first = seconds() - start;
  }
  const double start = seconds();
  llama_token next = 1;
  for (int i = 0; i < fresh; i++) {
    if (llama_decode(context, llama_batch_get_one(&next, 1))) return 1;
    const float *logits = llama_get_logits_ith(context, -1);
    next = 0;
    for (int v = 1; v < vocab; v++)
      if (logits[v] > logits[next]) next = v;
  }
  const double later = seconds() - start;
  printf("{\"prompt_tokens\": %d, \"prompt_seconds\": %.6f, \"tokens_per_second\": %.3f}\n", prompt, first, fresh / later);
  return 0;
}
