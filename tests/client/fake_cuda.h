// A CUDA driver for machines without one: a library of the tests', libcuda.so.1, with what the client uses of a driver's, and
// cuMemAlloc for a trainer's own tensors. Its GPUs are cuda:0, cuda:1 and cuda:2; the last reaches no memory of other processes.
//
// The memory of a GPU is a memfd's, as is the descriptor that another process lends. Where the user sees it the host cannot
// read it. As strict as a driver, and as late as one may be: a copy is made only when its stream is waited for, asked whether it
// is done, or ends, or memory is unmapped; so that whoever forgets to wait never gets it.
//
// A program finds it by LD_LIBRARY_PATH, by its path, or, once that was opened, as libcuda.so.1, its soname.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ballast {

// What a test sees of it and sets; get it from the library's function FakeCudaOfTests, of this type:
class FakeCuda;
using FakeCudaFunction = FakeCuda* (*)();

// Thread-safe.
class FakeCuda {
 public:
  struct Live {
    int64_t contexts = 0, streams = 0, copies = 0, works = 0, allocations = 0, reservations = 0, mappings = 0;
    bool operator==(const Live&) const = default;
  };
  virtual ~FakeCuda() = default;
  // What was made, or retained, and not ended yet. Copies: those not made yet; works: of others, on streams.
  virtual Live live() = 0;
  // Of the driver's functions so far; without cuGetErrorString.
  virtual int64_t calls() = 0;
  // The call with that number from now on, 1 for the next, returns this CUresult; 0: none does. One that ends something or
  // waits, and a copy, does its work all the same, as where an earlier failure is told of.
  virtual void FailCall(int64_t number, int error) = 0;
  // Copies to and from this address wait; nullptr: none does, and those that did go on.
  virtual void HoldCopies(const void* at) = 0;
  // Waits until a copy waits, a minute at most; whether one does.
  virtual bool AwaitHeld() = 0;
  // Every call returns CUDA_ERROR_DEINITIALIZED, as at the process's exit, where the driver ends before what was made before
  // its cuInit.
  virtual void ShutDown() = 0;
  // Forgets what is live, and all that was set. No call may be under way.
  virtual void Reset() = 0;
  // The GPUs whose contexts the calling thread has made current; the last is.
  virtual std::vector<int> current() = 0;

  // For a fake NCCL, which works on the GPUs' streams and memory:
  // The GPU whose context is current for the calling thread; -1: none.
  virtual int current_gpu() = 0;
  // Where the fake finds those bytes, which are the host's elsewhere; nullptr: the GPU has no access to all of them.
  virtual std::byte* Resolve(const void* at, uint64_t bytes, int gpu) = 0;
  // Work that comes after all that the stream was given before; the stream is not done until it is. 0: no such stream.
  virtual int64_t BeginWork(void* stream, int gpu) = 0;
  // Waits until all is done that comes before; false: the work, or its stream, was ended meanwhile.
  virtual bool AwaitTurn(int64_t work) = 0;
  virtual void EndWork(int64_t work) = 0;
};

}  // namespace ballast
