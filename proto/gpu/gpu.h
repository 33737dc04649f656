// A GPU by its driver alone, for a trainer and for a daemon: memory there, its own or lent by a process on the same host, and
// copies between that, a trainer's tensors and the host's memory.
//
// The CUDA driver is found at run time: libcuda.so.1, of CUDA 11.0 (450.36) or later; nothing of CUDA is linked. The context
// is the GPU's primary one, which is torch's, so that addresses of either are good for the other; it is kept while the Gpu or
// memory of it lives. Addresses are the driver's unified ones: of the host, this GPU, or another.
//
// Thread-safe. Calls leave the calling thread's current context as it was. A status names the call of the driver's that failed,
// with the driver's text and code; it is INTERNAL, if nothing else is said.
//
// In a fork of the process that opened it a Gpu calls the driver no more, not even when it ends: all that can fail answers
// FAILED_PRECONDITION, with what to do. It may also end after the driver has shut down, at the process's exit.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // Memory that another process allocated, mapped for reading and writing by the Gpu, which it keeps. Its end unmaps it: no
  // copy may be under way then. What its allocator does meanwhile is no matter: the memory lives as long as it is mapped.
  class Memory {  // or its own, of Allocate
   public:
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }  // of the GPU: the host cannot read it
    uint64_t bytes() const { return bytes_; }

   private:
    friend class Gpu;
    Memory(std::shared_ptr<Gpu> gpu, uint64_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {}
    absl::Status Map(int fd);
    absl::Status Take();

    const std::shared_ptr<Gpu> gpu_;
    const uint64_t bytes_;
    uint64_t address_ = 0;  // 0: none is reserved
    bool mapped_ = false, own_ = false;
  };

  // Work that the GPU does in the order given, and waits for no other stream. Its end waits until that is done.
  class Stream {
   public:
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    void* handle() const { return handle_; }  // cudaStream_t
    // Whether all that was given is done.
    absl::StatusOr<bool> Done() const;

   private:
    friend class Gpu;
    Stream(std::shared_ptr<Gpu> gpu, void* handle) : gpu_(std::move(gpu)), handle_(handle) {}

    const std::shared_ptr<Gpu> gpu_;
    void* const handle_;
  };

  // The GPU that is torch's cuda:`ordinal` in this process. NOT_FOUND: no driver, or no such GPU; FAILED_PRECONDITION: the
  // driver is too old, and the message names what it lacks. `driver`: another library in its place, for tests.
  static absl::StatusOr<std::shared_ptr<Gpu>> Open(int ordinal, const char* driver = "libcuda.so.1");
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Maps `bytes` of the allocation that `fd` stands for, from its start: a multiple of the driver's granularity, 2 MiB. The
  // descriptor stays the caller's, who may close it at once. FAILED_PRECONDITION: this GPU cannot reach that memory, or `fd`
  // is something else; RESOURCE_EXHAUSTED: no memory for it.
  absl::StatusOr<std::unique_ptr<Memory>> Import(int fd, uint64_t bytes);
  // RESOURCE_EXHAUSTED: no memory for it.
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(uint64_t bytes);
  absl::StatusOr<std::unique_ptr<Stream>> NewStream();

  // Whether `at` is memory of a GPU, of any; not of the host, pinned or not. True, too, where the driver cannot tell, since it
  // failed or in a fork: a Copy then says why, where the host's own might crash.
  bool Owns(const void* at) const;

  // Copies, whatever the two are memory of, and returns when that is done. Does not wait for other streams: `from` must have
  // been written before, and `to` be free. Copies of several threads do not wait for each other; each has a stream then. After
  // a failure `to` holds anything.
  absl::Status Copy(void* to, const void* from, uint64_t bytes);

  // Calls with the Gpu's context as the current one; where that fails, `anyway` without it.
  absl::Status InContext(absl::FunctionRef<absl::Status()> call, bool anyway = false) const;
  absl::Status CheckNotFork() const;

 private:
  struct Driver;
  explicit Gpu(std::unique_ptr<const Driver> driver);
  absl::Status Retain(int ordinal);
  absl::StatusOr<void*> TakeStream();

  const std::unique_ptr<const Driver> driver_;
  const pid_t process_;
  int device_ = 0;
  void* context_ = nullptr;  // none is retained
  absl::Mutex mu_;
  std::vector<void*> idle_ ABSL_GUARDED_BY(mu_);  // streams; the others are in use
};

}  // namespace ballast
