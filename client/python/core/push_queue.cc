#include "client/python/core/push_queue.h"

#include <unistd.h>

#include <deque>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/python/core/status_error.h"

namespace ballast {

namespace nb = nanobind;

struct PushQueue::State {
  struct Gradient {
    uint32_t tensor = 0;
    Address address = 0;
    uint64_t bytes = 0;
    bool arrived = false, dropped = false;
  };

  explicit State(std::weak_ptr<Client> of) : client(std::move(of)) {}

  void Run();
  absl::Status Push(const Gradient& gradient) const;
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return stopping || (!gradients.empty() && gradients.front().arrived);
  }

  const std::weak_ptr<Client> client;
  absl::Mutex mu;
  std::deque<Gradient> gradients ABSL_GUARDED_BY(mu);  // not counted yet; the first may be under way
  uint64_t counted ABSL_GUARDED_BY(mu) = 0;
  absl::Status failed ABSL_GUARDED_BY(mu);
  bool stopping ABSL_GUARDED_BY(mu) = false;
};

namespace {

// What the GPU is handed: it may call when the queue is gone.
struct Arrival {
  std::weak_ptr<void> state;
  uint64_t number = 0;  // of the gradient, from 0
};

}  // namespace

void PushQueue::State::Run() {
  for (;;) {
    Gradient gradient;
    {
      absl::MutexLock lock(&mu);
      mu.Await(absl::Condition(this, &State::HasWork));
      if (stopping) return;
      gradient = gradients.front();
      if (!failed.ok()) gradient.dropped = true;
    }
    absl::Status pushed = gradient.dropped ? absl::OkStatus() : Push(gradient);
    absl::MutexLock lock(&mu);
    if (!gradients.front().dropped) failed.Update(pushed);
    gradients.pop_front();
    ++counted;
  }
}

absl::Status PushQueue::State::Push(const Gradient& gradient) const {
  const std::shared_ptr<Client> open = client.lock();
  if (open == nullptr) return absl::FailedPreconditionError("the connection is closed");
  return open->Push(gradient.tensor, BytesAt(gradient.address, gradient.bytes));
}

PushQueue::PushQueue(std::weak_ptr<Client> client)
    : state_(std::make_shared<State>(std::move(client))),
      process_(getpid()),
      thread_([state = state_] { state->Run(); }) {}

PushQueue::~PushQueue() {
  if (!thread_.joinable()) return;  // it was moved from
  if (getpid() != process_) {       // a fork has no such thread, and its lock may be held for ever
    new std::thread(std::move(thread_));
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  {
    absl::MutexLock lock(&state_->mu);
    state_->stopping = true;
  }
  nb::gil_scoped_release unlocked;
  thread_.join();
}

Address PushQueue::Put(uint32_t tensor, Address address, uint64_t bytes) {
  absl::MutexLock lock(&state_->mu);
  const uint64_t number = state_->counted + state_->gradients.size();
  state_->gradients.push_back({.tensor = tensor, .address = address, .bytes = bytes});
  return reinterpret_cast<Address>(new Arrival{.state = state_, .number = number});
}

void PushQueue::TakeBack(Address arrival) {
  delete reinterpret_cast<Arrival*>(arrival);
  absl::MutexLock lock(&state_->mu);
  state_->gradients.pop_back();
}

void PushQueue::Arrived(void* data) {
  const std::unique_ptr<Arrival> arrival(static_cast<Arrival*>(data));
  const auto state = std::static_pointer_cast<State>(arrival->state.lock());
  if (state == nullptr) return;
  absl::MutexLock lock(&state->mu);
  state->gradients[arrival->number - state->counted].arrived = true;
}

uint64_t PushQueue::CountPushed() const {
  absl::MutexLock lock(&state_->mu);
  return state_->counted;
}

bool PushQueue::AwaitPushed(uint64_t count, double timeout_s) {
  absl::Status failed;
  bool enough = false;
  {
    nb::gil_scoped_release unlocked;
    absl::MutexLock lock(&state_->mu);
    const auto decided = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return state_->counted >= count || !state_->failed.ok();
    };
    state_->mu.AwaitWithTimeout(absl::Condition(&decided), absl::Seconds(timeout_s));
    enough = state_->counted >= count;
    for (State::Gradient& gradient : state_->gradients) gradient.dropped |= !state_->failed.ok();
    failed = std::exchange(state_->failed, absl::OkStatus());
  }
  OrThrow(failed);
  return enough;
}

void PushQueue::Drop() {
  absl::MutexLock lock(&state_->mu);
  for (State::Gradient& gradient : state_->gradients) gradient.dropped = true;
  state_->failed = absl::OkStatus();
}

void BindPushQueue(nb::module_& module) {
  using nb::arg;
  nb::class_<PushQueue>(module, "PushQueue")
      .def("put", &PushQueue::Put, arg("tensor"), arg("address"), arg("nbytes"))
      .def("take_back", &PushQueue::TakeBack, arg("arrival"))
      .def("count_pushed", &PushQueue::CountPushed)
      .def("await_pushed", &PushQueue::AwaitPushed, arg("count"), arg("timeout_s"))
      .def("drop", &PushQueue::Drop);
  module.attr("arrived") = reinterpret_cast<Address>(&PushQueue::Arrived);
}

}  // namespace ballast
