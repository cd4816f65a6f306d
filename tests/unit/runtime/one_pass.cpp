// Passes by a library of another system, which its Python would make: what they give, in bits, and who made the library.
//
//     one_pass LIBRARY

#include <cstdio>
#include <cstring>
#include <vector>

#include "program.h"

#ifdef _WIN32  // windows.h has names of ours
extern "C" __declspec(dllimport) void* LoadLibraryA(const char*);
extern "C" __declspec(dllimport) void* GetProcAddress(void*, const char*);
static void* opened(const char* path) { return LoadLibraryA(path); }
static void* found(void* library, const char* name) { return GetProcAddress(library, name); }
#else
#include <dlfcn.h>
static void* opened(const char* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void* found(void* library, const char* name) { return dlsym(library, name); }
#endif

constexpr int64_t VOCABULARY = 64, INPUTS = 256, OUTPUTS = 512, ROWS = 2, TOKENS = 5, ALL = ROWS * TOKENS;

static float number() {  // between -1 and 1
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return float(int32_t(state >> 8)) / (1 << 23) - 1;
}

static void print(const char* what, const void* numbers, int64_t bytes) {
  uint64_t sum = 14695981039346656037u;
  for (int64_t i = 0; i < bytes; ++i) sum = (sum ^ static_cast<const uint8_t*>(numbers)[i]) * 1099511628211u;
  std::printf("%s %016llx\n", what, static_cast<unsigned long long>(sum));
}

static Operand in_body(int64_t at, int64_t width) { return {BODY, at, width * 4, 0, 0, 1, 0}; }

int main(int, char** arguments) {
  void* const library = opened(arguments[1]);
  if (!library) return std::puts("cannot be loaded"), 1;
  const auto compiler = reinterpret_cast<const char* (*)()>(found(library, "outrider_runtime_compiler"));
  const auto workers = reinterpret_cast<void* (*)(int64_t)>(found(library, "outrider_runtime_workers"));
  const auto dismiss = reinterpret_cast<void (*)(void*)>(found(library, "outrider_runtime_dismiss"));
  const auto run = reinterpret_cast<void (*)(const Program*, const Pass*, void*)>(found(library, "outrider_runtime_run"));
  const auto linear = reinterpret_cast<void (*)(const Op*, const char*, int64_t, char*, void*)>(found(library, "outrider_runtime_linear"));
  const auto noise = reinterpret_cast<void (*)(uint64_t, uint64_t, const int64_t*, double* const*, int64_t, int64_t)>(
      found(library, "outrider_noise"));
  std::fprintf(stderr, "%s\n", compiler());

  std::vector<float> table(VOCABULARY * INPUTS), weight(INPUTS * OUTPUTS), logits(ALL * OUTPUTS), first;
  for (float& one : table) one = number();
  for (float& one : weight) one = number() / 16;
  std::vector<char> arena(ALL * (INPUTS + 2 * OUTPUTS) * 4);
  Op ops[3] = {};
  ops[0].code = EMBED, ops[0].format = TABLE, ops[0].cols = ops[0].K = INPUTS, ops[0].N = VOCABULARY, ops[0].weight = table.data();
  ops[0].out = in_body(0, INPUTS);
  ops[1].code = LINEAR, ops[1].format = PANELS_FP32, ops[1].K = INPUTS, ops[1].N = OUTPUTS, ops[1].weight = weight.data();
  ops[1].in[0] = ops[0].out, ops[1].out = in_body(INPUTS * 4, OUTPUTS);
  ops[2].code = GELU, ops[2].rows = 1, ops[2].cols = OUTPUTS, ops[2].in[0] = ops[1].out, ops[2].out = in_body((INPUTS + OUTPUTS) * 4, OUTPUTS);
  const Phase phases[] = {{TOKENWISE, 0, 1, 0}, {LINEARS, 1, 2, 0}, {TOKENWISE, 2, 3, 0}};
  Program program = {};
  program.num_ops = program.num_phases = 3, program.ops = ops, program.phases = phases;
  program.body_bytes = (INPUTS + 2 * OUTPUTS) * 4, program.logits = ops[2].out, program.vocab_size = OUTPUTS;

  std::vector<int64_t> ids(ALL), columns(TOKENS);
  for (int64_t i = 0; i < ALL; ++i) ids[i] = i * 7 % VOCABULARY;
  for (int64_t i = 0; i < TOKENS; ++i) columns[i] = i;
  Pass pass = {};
  pass.rows = ROWS, pass.tokens = pass.num_columns = TOKENS, pass.ids = ids.data(), pass.columns = columns.data();
  pass.logits = logits.data(), pass.arena = arena.data();

  std::vector<uint16_t> x(ALL * INPUTS), panels(INPUTS * OUTPUTS), out(ALL * OUTPUTS);
  const auto rounded = [](float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t(bits >> 16);
  };
  for (uint16_t& one : x) one = rounded(number());
  for (uint16_t& one : panels) one = rounded(number());
  Op layer = {};
  layer.format = PANELS_BF16, layer.K = INPUTS, layer.N = OUTPUTS, layer.weight = panels.data(), layer.out.is_bf16 = 1;

  for (int64_t threads : {1, 3}) {
    void* const own = workers(threads);
    for (int turn = 0; turn < 50; ++turn) {
      std::fill(logits.begin(), logits.end(), 0.f);
      run(&program, &pass, own);
      if (first.empty()) first = logits;
      if (std::memcmp(first.data(), logits.data(), logits.size() * 4)) return std::puts("passes differ"), 1;
      linear(&layer, reinterpret_cast<char*>(x.data()), ALL, reinterpret_cast<char*>(out.data()), own);
    }
    print("logits", logits.data(), ALL * OUTPUTS * 4), print("linear", out.data(), ALL * OUTPUTS * 2);
    dismiss(own);
  }
  std::vector<double> table_of_noise(1000);
  double* const tables[] = {table_of_noise.data()};
  const int64_t positions[] = {5};
  noise(7, 1, positions, tables, 1, 1000);
  print("noise", table_of_noise.data(), 8000);
}
