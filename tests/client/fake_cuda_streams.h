// The streams of the fake CUDA driver, fake_cuda.h, and what is to be done on them: copies, each made as late as may be, and
// the work of others, a fake NCCL's. Results are CUresults. The caller locks them; who waits lets go of the lock meanwhile.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "tests/client/fake_cuda_memory.h"

namespace ballast {

class FakeCudaStreams {
 public:
  using Lock = std::unique_lock<std::mutex>;
  struct Copy {
    cuda::Address to = 0, from = 0;  // as the user sees them
    std::byte* write = nullptr;
    const std::byte* read = nullptr;
    size_t bytes = 0;
  };

  void* Make(int gpu);
  int Give(void* stream, int gpu, const Copy& copy);
  int Query(void* stream, int gpu, Lock& lock);
  int Synchronize(void* stream, int gpu, Lock& lock);
  int Destroy(void* stream, int gpu, Lock& lock);
  // Waits for the GPU's streams, and for the copies of other GPUs' that wait for nobody's work.
  void DrainAll(int gpu, Lock& lock);
  // Those of a GPU, or all, end with what is on them.
  void Clear(int gpu);
  void Clear();

  // As FakeCuda has them.
  int64_t BeginWork(void* stream, int gpu);
  bool AwaitTurn(int64_t work, Lock& lock);
  void EndWork(int64_t work);
  void Hold(cuda::Address at);
  bool AwaitHeld(Lock& lock);

  int64_t streams() const { return static_cast<int64_t>(streams_.size()); }
  int64_t copies() const;
  int64_t works() const { return static_cast<int64_t>(works_.size()); }

 private:
  struct Item {
    Copy copy;
    int64_t work = 0;  // not 0: it is no copy
  };
  struct Stream {
    int gpu = 0;
    bool copying = false;
    std::deque<Item> items;
  };
  std::shared_ptr<Stream> Find(void* stream, int gpu) const;
  bool IsHeld(const Copy& copy) const { return held_ != 0 && (copy.to == held_ || copy.from == held_); }
  void MakeCopy(Stream& stream, Lock& lock);
  void Drain(const std::shared_ptr<Stream>& stream, bool of_others, Lock& lock);

  std::condition_variable changed_;
  cuda::Address held_ = 0;
  int waiting_ = 0;  // copies that are held
  uint64_t last_stream_ = 0x1000;
  int64_t last_work_ = 0;
  std::map<void*, std::shared_ptr<Stream>> streams_;
  std::map<int64_t, std::shared_ptr<Stream>> works_;
};

}  // namespace ballast
