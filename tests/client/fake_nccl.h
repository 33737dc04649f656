// NCCL for machines without GPUs: a library of the tests', libnccl.so.2, with what NcclLink uses of NCCL's; it moves bytes
// between the fake CUDA driver's GPUs, fake_cuda.h, and the host's memory, within a process or between processes of a host.
//
// As strict as NCCL, and stricter where that would hang or go wrong unseen: communicators are of two, and do not block; a call
// while the last is in progress is an error, as is one without the current context of the communicator's GPU; a group moves
// bytes one way, on one stream; ends whose sizes differ fail. Like NCCL it connects in the background, takes a group when both
// ends have begun their first, and moves its bytes when the stream has come to it. What failed ends by ncclCommAbort alone.
//
// A program finds it by LD_LIBRARY_PATH, by its path, or, once that was opened, as libnccl.so.2, its soname. The fake CUDA
// driver must have been opened before.
#pragma once

#include <cstdint>

namespace ballast {

// What a test sees of it and sets; get it from the library's function FakeNcclOfTests, of this type:
class FakeNccl;
using FakeNcclFunction = FakeNccl* (*)();

// Thread-safe.
class FakeNccl {
 public:
  virtual ~FakeNccl() = default;
  // Communicators that were made and not aborted yet.
  virtual int64_t live() = 0;
  // Of NCCL's functions so far; without ncclGetErrorString and ncclGetLastError.
  virtual int64_t calls() = 0;
  // The call of that function with that number from now on, 1 for the next, returns this ncclResult_t; 0: none does. An abort
  // does its work all the same.
  virtual void FailCall(const char* function, int64_t number, int result) = 0;
  // Whether that call has come.
  virtual bool failed() = 0;
  // Groups are not taken: their communicators stay in progress.
  virtual void HoldLaunches(bool held) = 0;
  // Transfers stand still before their first byte.
  virtual void HoldTransfers(bool held) = 0;
  // Waits until a transfer stands still for that, a minute at most; whether one does.
  virtual bool AwaitHeld() = 0;
  // Aborts wait before they do anything.
  virtual void HoldAborts(bool held) = 0;
  // Waits until so many wait for that, a minute at most; whether they do.
  virtual bool AwaitHeldAborts(int count) = 0;
  // An end that is gone is not noticed: what waits for it never ends. Else it is a ncclRemoteError.
  virtual void Silent(bool silent) = 0;
  // Every live communicator has a ncclSystemError now.
  virtual void Break() = 0;
  virtual void SetVersion(int version) = 0;
  // Bytes that this process's communicators sent and received.
  virtual int64_t sent() = 0;
  virtual int64_t received() = 0;
  // Whether the calling thread is between ncclGroupStart and ncclGroupEnd.
  virtual bool in_group() = 0;
  // Aborts what is live, forgets ids that wait, and all that was set. No call may be under way.
  virtual void Reset() = 0;
};

}  // namespace ballast
