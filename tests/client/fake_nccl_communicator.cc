#include "tests/client/fake_nccl_communicator.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "tests/client/fake_nccl_root.h"

namespace ballast {

FakeNcclCommunicator::FakeNcclCommunicator(FakeNcclControl* control, FakeCuda* cuda, int gpu, std::string root,
                                           int rank)
    : control_(control), cuda_(cuda), gpu_(gpu), root_(std::move(root)), rank_(rank) {
  takes_ = std::thread([this] { TakeGroups(); });
  moves_ = std::thread([this] { MoveGroups(); });
}

int FakeNcclCommunicator::state() {
  const Lock lock(control_->mu);
  return state_;
}

std::string FakeNcclCommunicator::error() {
  const Lock lock(control_->mu);
  return error_;
}

void FakeNcclCommunicator::Begin(Group group) {
  const Lock lock(control_->mu);
  begun_ = std::move(group);
  if (!failed_) state_ = nccl::kInProgress;
  control_->changed.notify_all();
}

void FakeNcclCommunicator::Fail(int result, const std::string& text) {
  const Lock lock(control_->mu);
  if (failed_ || aborted_) return;
  failed_ = true;
  state_ = result;
  error_ = text;
  if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
  control_->changed.notify_all();
}

void FakeNcclCommunicator::Abort() {
  {
    const Lock lock(control_->mu);
    if (aborted_) return;
    aborted_ = true;
    if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
    for (const Taken& taken : taken_) cuda_->EndWork(taken.work);
    control_->changed.notify_all();
  }
  takes_.join();
  moves_.join();
  const Lock lock(control_->mu);
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
}

// In place of the one before; false: it is too late.
bool FakeNcclCommunicator::Keep(int fd) {
  const Lock lock(control_->mu);
  if (socket_ >= 0) close(socket_);
  socket_ = fd;
  if (fd >= 0 && (failed_ || aborted_)) shutdown(fd, SHUT_RDWR);
  return fd >= 0 && !failed_ && !aborted_;
}

// --- connecting, and taking what is begun ---------------------------------------------------------------------------

void FakeNcclCommunicator::TakeGroups() {
  if (!Connect()) return;
  for (bool is_first = true;; is_first = false) {
    Group group;
    {
      Lock lock(control_->mu);
      control_->changed.wait(
          lock, [this] { return aborted_ || failed_ || (begun_.has_value() && !control_->hold_launches); });
      if (aborted_ || failed_) return;
      group = *begun_;
    }
    if ((is_first && !Meet()) || !Take(group)) return;
  }
}

bool FakeNcclCommunicator::Connect() {
  const int root = FakeNcclRoot::Connect(root_, rank_);
  if (!Keep(root)) {
    if (root < 0) Fail(nccl::kSystemError, "nobody listens for that id");
    return false;
  }
  const int other = FakeNcclRoot::Await(root);
  if (!Keep(other)) {
    if (other < 0) Fail(nccl::kSystemError, "who made the id is gone");
    return false;
  }
  const Lock lock(control_->mu);
  if (!failed_) state_ = nccl::kSuccess;
  return true;
}

// The first groups of both ends connect their GPUs.
bool FakeNcclCommunicator::Meet() {
  char byte = 'm';
  return Exchange(true, &byte, 1) && Exchange(false, &byte, 1);
}

bool FakeNcclCommunicator::Take(const Group& group) {
  Lock lock(control_->mu);
  if (aborted_ || failed_) return false;
  const int64_t work = cuda_->BeginWork(group.stream, gpu_);
  if (work == 0) {
    lock.unlock();
    Fail(nccl::kCudaError, "the GPU has no such stream");
    return false;
  }
  taken_.push_back({.group = group, .work = work});
  begun_.reset();
  state_ = nccl::kSuccess;
  control_->changed.notify_all();
  return true;
}

// --- moving bytes ---------------------------------------------------------------------------------------------------

// What fails stands still on its stream until the abort.
void FakeNcclCommunicator::MoveGroups() {
  for (;;) {
    Taken next;
    {
      Lock lock(control_->mu);
      control_->changed.wait(lock, [this] { return aborted_ || failed_ || !taken_.empty(); });
      if (aborted_ || failed_) return;
      next = taken_.front();
    }
    if (!cuda_->AwaitTurn(next.work) || !AwaitRelease() || !Move(next.group)) return;
    const Lock lock(control_->mu);
    if (aborted_ || failed_) return;
    taken_.pop_front();
    cuda_->EndWork(next.work);
  }
}

bool FakeNcclCommunicator::AwaitRelease() {
  Lock lock(control_->mu);
  ++control_->held;
  control_->changed.notify_all();
  control_->changed.wait(lock, [this] { return aborted_ || failed_ || !control_->hold_transfers; });
  --control_->held;
  return !aborted_ && !failed_;
}

bool FakeNcclCommunicator::Move(const Group& group) {
  for (const Piece& piece : group.pieces) {
    std::byte* const at = piece.bytes == 0 ? nullptr : cuda_->Resolve(piece.at, piece.bytes, gpu_);
    if (piece.bytes > 0 && at == nullptr) {
      Fail(nccl::kCudaError, "an illegal memory access was encountered");
      return false;
    }
    uint64_t others = piece.bytes;
    if (!Exchange(group.sends, &others, sizeof(others))) return false;
    if (others != piece.bytes) {
      Fail(nccl::kInvalidUsage, "the other end sends " + std::to_string(others) + " bytes where this one receives " +
                                    std::to_string(piece.bytes));
      return false;
    }
    if (!Exchange(group.sends, at, piece.bytes)) return false;
    const Lock lock(control_->mu);
    (group.sends ? control_->sent : control_->received) += static_cast<int64_t>(piece.bytes);
  }
  return true;
}

// False: one of the two ends is gone, or has failed.
bool FakeNcclCommunicator::Exchange(bool sends, void* at, size_t bytes) {
  auto* next = static_cast<char*>(at);
  while (bytes > 0) {
    const ssize_t moved = sends ? send(socket_, next, bytes, MSG_NOSIGNAL) : recv(socket_, next, bytes, 0);
    if (moved <= 0) {
      Lock lock(control_->mu);
      const bool silent = control_->silent;
      lock.unlock();
      if (!silent) Fail(nccl::kRemoteError, "the other end closed the connection");
      return false;
    }
    next += moved;
    bytes -= static_cast<size_t>(moved);
  }
  return true;
}

}  // namespace ballast
