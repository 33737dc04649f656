// Drives a libFuzzer target without libFuzzer:  kernels_fuzz [FOLDER] [COUNT [SEED]]. First the inputs that the folder
// keeps, then random bytes, in half of them floats of moderate size, so that what is behind the first checks is reached
// too. A failing input's file or number is printed.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
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
std::string file;  // when it is one
void SayWhich(int) {
  if (!file.empty()) std::fprintf(stderr, "%s failed\n", file.c_str());
  if (file.empty()) std::fprintf(stderr, "input %llu failed\n", static_cast<unsigned long long>(current));
}

// How many there are.
uint64_t Replay(const char* folder) {
  uint64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    file = entry.path().string();
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string input{std::istreambuf_iterator<char>(in), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    ++count;
  }
  file.clear();
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGABRT, &SayWhich);
  uint64_t kept = 0;
  if (argc > 1 && std::filesystem::is_directory(argv[1])) {
    kept = Replay(argv[1]);
    --argc, ++argv;
  }
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::vector<uint8_t> input = MakeInput(seed);
    current = seed;
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs, none failed\n", static_cast<unsigned long long>(kept + count));
  return 0;
}
