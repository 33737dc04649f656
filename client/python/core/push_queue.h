// Gradients that a GPU is still copying to host memory. A thread of the queue's own pushes them in the order put, each once
// its copy is done, so that neither backward nor the interpreter's lock waits for the bytes.
//
// put() says what the GPU is to call when the copy is done: arrived(data), as cuLaunchHostFunc calls it, from any thread. The
// memory of a gradient is the queue's from put() on until count_pushed() counts it, whatever became of the push.
//
// One thread at a time makes all other calls, and no call of the client's own beside them but bind_weights. Used with the
// interpreter's lock, which is free while it waits.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <thread>

#include "client/cpp/client.h"
#include "client/python/core/memory.h"

namespace ballast {

class PushQueue {
 public:
  // A queue whose client is closed pushes nothing any more.
  explicit PushQueue(std::weak_ptr<Client> client);
  PushQueue(PushQueue&&) = default;
  ~PushQueue();

  // What arrived() is to be called with, once.
  Address Put(uint32_t tensor, Address address, uint64_t bytes);
  // Instead of that, at once: the copy could not be started.
  void TakeBack(Address arrival);
  // A call of cuLaunchHostFunc's kind.
  static void Arrived(void* data);
  // Those whose memory is free again, in all, in the order put.
  uint64_t CountPushed() const;
  // Waits for that many, but no longer than `timeout_s`. True: there are. Throws what a push failed with, once; the others
  // of that step are not pushed.
  bool AwaitPushed(uint64_t count, double timeout_s);
  // What was put and is not pushed yet will not be: it is counted when it has arrived. A failure is forgotten.
  void Drop();

 private:
  struct State;

  std::shared_ptr<State> state_;
  pid_t process_;
  std::thread thread_;
};

void BindPushQueue(nanobind::module_& module);

}  // namespace ballast
