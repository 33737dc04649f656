// Drives a libFuzzer target without libFuzzer:
//
//   kernels_fuzz [COUNT [SEED]]           random inputs
//   session_fuzz --seconds N FOLDER [SEED]   every file of the folder; then, for so long, such files with some bytes
//                                            changed, left out or repeated, and random inputs up to twice as long as
//                                            the longest file
//
// Random inputs are random bytes, in half of them floats of moderate size, so that what is behind the first checks is
// reached too. A failing input's number or file is printed; the same seed gives the same inputs.
#include <algorithm>
#include <chrono>
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

using Bytes = std::vector<uint8_t>;

Bytes MakeInput(uint64_t seed, uint64_t most_bytes) {
  std::mt19937_64 random(seed);
  Bytes input(64 + random() % most_bytes);
  for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
  if (seed % 2 == 0) return input;
  for (size_t i = 64; i + 4 <= input.size(); i += 4) {
    const uint32_t bits = static_cast<uint32_t>(random() & 0x807fffff) | static_cast<uint32_t>(90 + random() % 60)
                                                                             << 23;
    std::memcpy(&input[i], &bits, sizeof bits);
  }
  return input;
}

Bytes Change(Bytes input, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint64_t changes = 1 + random() % 8; changes > 0 && !input.empty(); --changes) {
    const auto at = input.begin() + static_cast<std::ptrdiff_t>(random() % input.size());
    const auto end = at + std::min<std::ptrdiff_t>(input.end() - at, static_cast<std::ptrdiff_t>(1 + random() % 16));
    const Bytes piece(at, end);
    const auto to = static_cast<std::ptrdiff_t>(random() % input.size());
    switch (random() % 4) {
      case 0:
        input.erase(at, end);
        break;
      case 1:
        input.insert(input.begin() + to, piece.begin(), piece.end());
        break;
      default:
        *at = random() % 2 == 0 ? static_cast<uint8_t>(random()) : static_cast<uint8_t>(random() % 16);
    }
  }
  return input;
}

// For the handler of SIGABRT, with which a target reports a failure.
volatile uint64_t current = 0;
void SayWhich(int) { std::fprintf(stderr, "input %llu failed\n", static_cast<unsigned long long>(current)); }

void RunInput(const Bytes& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

int RunCount(uint64_t count, uint64_t first) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    current = seed;
    RunInput(MakeInput(seed, 8000));
  }
  std::printf("%llu inputs, none failed\n", static_cast<unsigned long long>(count));
  return 0;
}

std::vector<Bytes> ReadFolder(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> files;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return files;
}

bool Shorter(const Bytes& a, const Bytes& b) { return a.size() < b.size(); }

int RunFolder(double seconds, const char* folder, uint64_t first) {
  const std::vector<Bytes> files = ReadFolder(folder);
  if (files.empty()) {
    std::fprintf(stderr, "%s holds no input\n", folder);
    return 2;
  }
  for (uint64_t i = 0; i < files.size(); ++i) {
    current = i;
    RunInput(files[i]);
  }
  const uint64_t most_bytes = 2 * std::max_element(files.begin(), files.end(), Shorter)->size();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t seed = first;
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    current = seed;
    RunInput(seed % 8 == 0 ? MakeInput(seed, most_bytes) : Change(files[seed % files.size()], seed));
  }
  std::printf("%zu files and %llu inputs from seed %llu on, none failed\n", files.size(),
              static_cast<unsigned long long>(seed - first), static_cast<unsigned long long>(first));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGABRT, &SayWhich);
  const auto number = [&](int at, uint64_t otherwise) {
    return argc > at ? std::strtoull(argv[at], nullptr, 10) : otherwise;
  };
  if (argc > 3 && std::strcmp(argv[1], "--seconds") == 0) {
    return RunFolder(std::strtod(argv[2], nullptr), argv[3], number(4, 1));
  }
  return RunCount(number(1, 20000), number(2, 1));
}
