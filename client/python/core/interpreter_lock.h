// The interpreter's lock, let go of and taken again. CPython before 3.14 ends a thread that wants the lock while the
// interpreter comes to its end, as a daemon thread in a call of ours may: by an unwinding that no function may stop, and
// some of ours and of nanobind's would, which ends the process with SIGABRT. Here such a thread sleeps until the process is
// gone, as 3.14 has it.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <exception>

namespace ballast {

// Around what may want the lock. Its end is reached by the unwinding that ends a thread only where it was neither passed nor
// is an exception of C++ on its way.
class EndOfThread {
 public:
  EndOfThread() = default;
  ~EndOfThread() {
    while (!passed_ && std::uncaught_exceptions() == before_) pause();
  }
  EndOfThread(const EndOfThread&) = delete;
  EndOfThread& operator=(const EndOfThread&) = delete;
  void Pass() { passed_ = true; }

 private:
  const int before_ = std::uncaught_exceptions();
  bool passed_ = false;
};

// Not inlined into a destructor: what may not throw has no use for what would be done on the way.
[[gnu::noinline]] inline void TakeAgain(PyThreadState* thread) {
  EndOfThread end;
  PyEval_RestoreThread(thread);
  end.Pass();
}

class LockFreed {
 public:
  LockFreed() : thread_(PyEval_SaveThread()) {}
  ~LockFreed() { TakeAgain(thread_); }
  LockFreed(const LockFreed&) = delete;
  LockFreed& operator=(const LockFreed&) = delete;

 private:
  PyThreadState* const thread_;
};

// In a thread that may have it already.
class LockTaken {
 public:
  LockTaken() {
    EndOfThread end;
    state_ = PyGILState_Ensure();
    end.Pass();
  }
  ~LockTaken() { PyGILState_Release(state_); }
  LockTaken(const LockTaken&) = delete;
  LockTaken& operator=(const LockTaken&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace ballast
