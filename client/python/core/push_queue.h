// Gradients that a GPU is still copying to host memory. A thread of the queue's own pushes them in the order put, each once
// its copy is done, so that neither backward nor the interpreter's lock waits for the bytes.
//
// Gradients are numbered in the order put, from 0. announce() has the CUDA driver say when the copy is done. The memory of a
// gradient is the queue's from put() until count_pushed() is past its number, whatever became of the push.
//
// arrive(): any thread. All else: one thread at a time, with no call of the client's own beside it but bind_weights; with the
// interpreter's lock, which is free while it waits. Throws in a fork, as the client does.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "client/cpp/client.h"
#include "client/python/core/memory.h"

namespace ballast {

class PushQueue {
 public:
  explicit PushQueue(std::weak_ptr<Client> client);
  PushQueue(PushQueue&&) = default;
  ~PushQueue();

  // Returns the gradient's number.
  uint64_t Put(uint32_t tensor, Address address, uint64_t bytes);
  // How many were put.
  uint64_t CountPut() const;
  // The gradient arrives when the stream, a CUstream whose context is current, has done what it was asked before.
  // UNIMPLEMENTED: there is no CUDA driver; INTERNAL: it refused. The gradient will not arrive then.
  void Announce(uint64_t number, Address stream) const;
  void Arrive(uint64_t number) const;
  // The last one will not be pushed, and its memory is not written to any more.
  void Cancel(uint64_t number) const;
  // How many no longer need their memory.
  uint64_t CountPushed() const;
  // Waits for that many, but no longer than `timeout_s`. True: there are. Throws what a push failed with, once; what was put
  // before that is not pushed. Throws, too, where the client was closed before there are that many.
  bool AwaitPushed(uint64_t count, double timeout_s) const;
  // What was put and is not pushed yet will not be: it is counted when it has arrived. A failure is forgotten.
  void Drop() const;

  // Ends all pushes, and returns when none is under way. For the client's end; may outlive the queue.
  std::function<void()> stop() const;

 private:
  struct State;
  // Throws in a fork.
  State& Own() const;

  std::shared_ptr<State> state_;
  pid_t process_;
  std::thread thread_;
};

void BindPushQueue(nanobind::module_& module);

}  // namespace ballast
