// What the parts of gpu_identity share: the count of what was compared, and of where CPU and GPU differ.
#pragma once

#include <iostream>
#include <string>
#include <vector>

#include "tests/kernels/cuda/device_memory.h"

namespace ballast::kernels {

struct Extent {
  bool reduced;  // a small part, for a run under compute-sanitizer
};

class Findings {
 public:
  void Compared(uint64_t elements) { compared_ += elements; }
  void Updated(uint64_t blocks, uint64_t rejected) { blocks_ += blocks, rejected_ += rejected; }
  // `where`: case, step, tensor, array, element; counts as one, however many elements differ there.
  void Differ(const std::string& where) {
    if (++differences_ <= kShown) std::cout << "DIFFERENT: " << where << std::endl;
    if (first_.empty()) first_ = where;
  }
  void Expect(bool holds, const std::string& what) {
    ++checks_;
    if (!holds) Differ(what);
  }
  // Arrays of words of `word` bytes; `name()` says where they are.
  template <class Name>
  bool Same(const std::byte* cpu, const std::byte* gpu, uint64_t bytes, uint64_t word, const Name& name) {
    uint64_t at = 0;
    while (at < bytes && cpu[at] == gpu[at]) ++at;
    if (at == bytes) return true;
    at = at / word * word;
    Differ(name(at / word) + ": CPU " + Hex(cpu + at, word) + ", GPU " + Hex(gpu + at, word));
    return false;
  }

  uint64_t compared() const { return compared_; }
  uint64_t blocks() const { return blocks_; }
  uint64_t rejected() const { return rejected_; }
  uint64_t differences() const { return differences_; }
  uint64_t checks() const { return checks_; }
  const std::string& first() const { return first_; }

 private:
  static constexpr uint64_t kShown = 30;
  // Little-endian bytes as one number.
  static std::string Hex(const std::byte* word, uint64_t bytes) {
    std::string text = "0x";
    for (uint64_t i = bytes; i-- > 0;) {
      for (const int shift : {4, 0}) text += "0123456789abcdef"[std::to_integer<unsigned>(word[i]) >> shift & 15];
    }
    return text;
  }
  uint64_t compared_ = 0, blocks_ = 0, rejected_ = 0, differences_ = 0, checks_ = 0;
  std::string first_;
};

// gpu_identity_updates.cc: every kernel. gpu_identity_codecs.cc: loading, serving, scales, divisions; and what is refused.
// gpu_identity_gradients.cc: sums and measures. gpu_identity_probes.cc: curvature. gpu_identity_matrices.cc: what a GPU makes
// orthogonal, which is near what the CPU does, and the same every time.
void CompareUpdates(const Extent& extent, const Stream& stream, Findings* findings);
void CompareManyTensors(const Extent& extent, const Stream& stream, Findings* findings);
void CompareCodecs(const Extent& extent, const Stream& stream, Findings* findings);
void CompareDivisions(const Stream& stream, Findings* findings);
void CompareSums(const Extent& extent, const Stream& stream, Findings* findings);
void CompareMeasures(const Extent& extent, const Stream& stream, Findings* findings);
void CompareProbes(const Extent& extent, const Stream& stream, Findings* findings);
void CompareMatrices(const Extent& extent, const Stream& stream, Findings* findings);
void CheckRefusals(const Stream& stream, Findings* findings);

}  // namespace ballast::kernels
