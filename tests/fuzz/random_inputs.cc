// Drives a libFuzzer target without libFuzzer:  kernels_fuzz [COUNT [SEED]]. Inputs are random bytes, in half of them
// floats of moderate size, so that what is behind the first checks is reached too. A failing input's number is printed.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

std::vector<uint8_t> MakeInput(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> input(64 + random() % 8000);
  for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
  if (seed % 2 == 0) return input;
  for (size_t i = 64; i + 4 <= input.size(); i += 4) {
    const uint32_t bits = static_cast<uint32_t>(random() & 0x807fffff) | static_cast<uint32_t>(90 + random() % 60)
                                                                             << 23;
    std::memcpy(&input[i], &bits, sizeof bits);
  }
  return input;
}

// For the handler of SIGABRT, with which a target reports a failure.
volatile uint64_t current = 0;
void SayWhich(int) { std::fprintf(stderr, "input %llu failed\n", static_cast<unsigned long long>(current)); }

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::signal(SIGABRT, &SayWhich);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::vector<uint8_t> input = MakeInput(seed);
    current = seed;
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs, none failed\n", static_cast<unsigned long long>(count));
  return 0;
}
