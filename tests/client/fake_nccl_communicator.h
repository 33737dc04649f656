// One end of a communicator of the fake NCCL's, fake_nccl.h: it connects, takes groups and moves their bytes in threads of its
// own. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/fake_cuda.h"

namespace ballast {

namespace nccl {
enum Result {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
}  // namespace nccl

// What all communicators have in common: what tests set and see.
struct FakeNcclControl {
  std::mutex mu;
  std::condition_variable changed;
  bool hold_launches = false, hold_transfers = false, hold_aborts = false, silent = false;
  int held = 0;  // transfers that stand still
  int held_aborts = 0;
  int64_t sent = 0, received = 0;
};

class FakeNcclCommunicator {
 public:
  struct Piece {
    void* at = nullptr;
    uint64_t bytes = 0;
  };
  struct Group {
    bool sends = false;
    void* stream = nullptr;
    std::vector<Piece> pieces;
  };

  // Begins to connect to the other rank, where `root` is (FakeNcclRoot).
  FakeNcclCommunicator(FakeNcclControl* control, FakeCuda* cuda, int gpu, std::string root, int rank);
  ~FakeNcclCommunicator() { Abort(); }
  FakeNcclCommunicator(const FakeNcclCommunicator&) = delete;
  FakeNcclCommunicator& operator=(const FakeNcclCommunicator&) = delete;

  int gpu() const { return gpu_; }
  int rank() const { return rank_; }
  // What ncclCommGetAsyncError tells.
  int state();
  // Of its failure; else empty.
  std::string error();
  // Its state was success.
  void Begin(Group group);
  // Its first failure stays its state.
  void Fail(int result, const std::string& text);
  // Ends all that is under way; once.
  void Abort();

 private:
  using Lock = std::unique_lock<std::mutex>;
  void TakeGroups();
  bool Connect();
  bool Meet();
  bool Take(const Group& group);
  void MoveGroups();
  bool AwaitRelease();
  bool Move(const Group& group);
  bool Exchange(bool sends, void* at, size_t bytes);
  bool Keep(int fd);

  FakeNcclControl* const control_;
  FakeCuda* const cuda_;
  const int gpu_;
  const std::string root_;
  const int rank_;

  // Of the control's mutex:
  int state_ = nccl::kInProgress;
  bool failed_ = false, aborted_ = false;
  std::string error_;
  int socket_ = -1;
  std::optional<Group> begun_;  // and not taken yet
  struct Taken {
    Group group;
    int64_t work = 0;
  };
  std::deque<Taken> taken_;  // the first is being moved

  std::thread takes_, moves_;
};

}  // namespace ballast
