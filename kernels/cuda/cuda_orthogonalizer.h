// What a GPU does between the two passes of an update over a matrix: OrthogonalizeMatrix (kernels/matrix/newton_schulz.h), its
// products by cuBLAS, which is found when the first is asked for. It is no part of CUDA's runtime: without it only rules over
// matrices are missing.
//
// Products are of bf16 numbers, summed in fp32, in cuBLAS's order: a result's bits are those of its version and of the GPU's
// model, the same at every step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/cuda_kernels.h"

namespace ballast::kernels {

// All pointers are memory of the device, 256-byte aligned.
struct DeviceMatrix {
  const DeviceUpdate* update;  // whose first pass is done: its sums and least norm are read
  uint64_t rows, columns;
  float* direction;  // U, row after row, and becomes O
  std::byte* room;   // of OrthogonalizingRoom numbers
};

class CudaOrthogonalizer {
 public:
  // Of the calling thread's current device, whose `stream` it works in from then on. nullptr: *why says what is missing.
  static std::unique_ptr<CudaOrthogonalizer> Open(CudaStream stream, std::string* why);
  ~CudaOrthogonalizer();

  // What the bits depend on, but the GPU's model: "cuBLAS 130100".
  const std::string& library() const { return library_; }
  // Launches, and returns at once: what failed, in words, or nothing. By one thread at a time.
  std::string Run(const DeviceMatrix& matrix);

 private:
  class Cublas;
  CudaOrthogonalizer(std::unique_ptr<Cublas> cublas, CudaStream stream, std::string library);

  const std::unique_ptr<Cublas> cublas_;
  const CudaStream stream_;
  const std::string library_;
};

}  // namespace ballast::kernels
