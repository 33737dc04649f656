// One GPU as GpuDevice uses it: memory, three streams, events, and the kernels. server/device/cuda_driver.cc has the
// real one; tests have one of host memory and threads.
//
// Work given to a stream is done later, in that stream's order. A failure of the device is kept: Await returns it from
// then on, and work given afterwards is dropped. What allocates and frees is thread-safe. One thread makes all other calls,
// except that a second may call Await at the same time, and any may call Read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_orthogonalizer.h"

namespace ballast {

class GpuDriver {
 public:
  enum class Memory { kDevice, kPinned };
  // Gradients come in, kernels run, weights and statistics go out: each in its own order.
  enum class Stream { kIn, kCompute, kOut };
  static constexpr int kStreams = 3;
  using Event = int;
  static constexpr Event kNoEvent = -1;

  virtual ~GpuDriver() = default;
  virtual int number() const = 0;         // CUDA's
  virtual std::string label() const = 0;  // "cuda:0"
  virtual std::string name() const = 0;   // for people
  virtual uint64_t memory_bytes() const = 0;
  // As Device::MatrixProducts. Thread-safe. Orthogonalize comes after one that was OK.
  virtual absl::StatusOr<std::string> MatrixProducts() = 0;

  // Zeroed, 256-byte aligned. RESOURCE_EXHAUSTED names what was asked for and what is free.
  virtual absl::StatusOr<std::byte*> Allocate(uint64_t bytes, Memory memory) = 0;
  virtual void Free(std::byte* data, Memory memory) = 0;
  // As kDevice memory, of at least so many bytes, that another process may import by the descriptor.
  struct Shared {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    int fd = -1;
  };
  // FAILED_PRECONDITION: the GPU or its driver cannot share memory.
  virtual absl::StatusOr<Shared> AllocateShared(uint64_t bytes) = 0;
  // What was given to the streams and uses it is done.
  virtual void FreeShared(const Shared& shared) = 0;
  // Copies from the GPU's memory to the host's, beside all streams; returns when it is done. Thread-safe.
  virtual void Read(void* to, const void* from, uint64_t bytes) = 0;

  virtual void Copy(Stream stream, void* to, const void* from, uint64_t bytes) = 0;
  virtual void Zero(Stream stream, void* to, uint64_t bytes) = 0;
  // These launch on kCompute; kernels/cuda/cuda_kernels.h and cuda_orthogonalizer.h describe them. Kernels and masters are
  // named by their index in the registry.
  virtual void Update(size_t kernel, kernels::DeviceUpdate* batch, int count, uint64_t tiles, bool ordinary) = 0;
  virtual void Direct(size_t kernel, const kernels::DeviceUpdate* batch, int count, uint64_t tiles) = 0;
  virtual void Orthogonalize(const kernels::DeviceMatrix& matrix) = 0;
  virtual void Sum(const kernels::DeviceSum* batch, int count, uint64_t tiles) = 0;
  virtual void Measure(const kernels::DeviceGradient* batch, int count, uint64_t tiles) = 0;
  virtual void ProbeCurvature(size_t kernel, const kernels::DeviceCurvature* batch, int count, uint64_t tiles) = 0;
  virtual void MoveAverages(size_t master, const kernels::DeviceAverage* batch, int count, uint64_t tiles) = 0;
  virtual void Load(size_t master, const kernels::DeviceCopy* batch, int count, uint64_t tiles,
                    kernels::WireIndex format) = 0;
  virtual void EncodeWeights(size_t master, const kernels::DeviceCopy* batch, int count, uint64_t tiles,
                             kernels::WireIndex format) = 0;
  virtual void RaiseScales(size_t master, const kernels::DeviceCopy* batch, int count, uint64_t tiles) = 0;

  virtual absl::StatusOr<Event> NewEvent() = 0;
  // One that nothing waits for any more. Thread-safe, like NewEvent.
  virtual void FreeEvent(Event event) = 0;
  // The event happens when all that the stream was given before is done. It may be recorded again once it happened.
  virtual void Record(Event event, Stream stream) = 0;
  // What the stream is given from now on waits for the event.
  virtual void Wait(Stream stream, Event event) = 0;
  // Blocks until the event as last recorded has happened.
  virtual absl::Status Await(Event event) = 0;
};

}  // namespace ballast
