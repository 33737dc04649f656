#include "client/python/core/push_queue.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <new>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/python/core/interpreter_lock.h"
#include "client/python/core/interruptible.h"
#include "client/python/core/py_client.h"
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
  void Arrive(uint64_t number);
  void DropAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    for (Gradient& gradient : gradients) gradient.dropped = true;
    hurries = true;
  }
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return stopped || (!gradients.empty() && gradients.front().arrived);
  }
  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return !pushing; }

  const std::weak_ptr<Client> client;
  absl::Mutex mu;
  std::deque<Gradient> gradients ABSL_GUARDED_BY(mu);  // not counted yet
  uint64_t counted ABSL_GUARDED_BY(mu) = 0;
  bool pushing ABSL_GUARDED_BY(mu) = false;  // the first
  bool stopped ABSL_GUARDED_BY(mu) = false;
  std::atomic<bool> hurries = false;  // the push under way is not to wait for the daemon
  absl::Status failed ABSL_GUARDED_BY(mu);
};

namespace {

// cuLaunchHostFunc of the CUDA driver's interface, which every process that computes on a GPU has loaded.
using HostFunction = void (*)(void*);
using LaunchHostFunction = int (*)(void* stream, HostFunction function, void* data);

LaunchHostFunction FindLaunch() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  return driver == nullptr ? nullptr : reinterpret_cast<LaunchHostFunction>(dlsym(driver, "cuLaunchHostFunc"));
}

}  // namespace

void PushQueue::State::Run() {
  thread_is_left = [this] { return hurries.load(); };
  absl::MutexLock lock(&mu);
  for (;;) {
    mu.Await(absl::Condition(this, &State::HasWork));
    if (stopped) return;
    hurries = false;
    const Gradient gradient = gradients.front();
    absl::Status pushed;
    if (!gradient.dropped && failed.ok()) {
      pushing = true;
      mu.Unlock();
      pushed = Push(gradient);
      mu.Lock();
      pushing = false;
    }
    if (!gradients.front().dropped) failed.Update(pushed);
    gradients.pop_front();
    ++counted;
  }
}

absl::Status PushQueue::State::Push(const Gradient& gradient) const {
  const std::shared_ptr<Client> open = client.lock();
  if (open == nullptr) return ConnectionIsClosed();
  return open->Push(gradient.tensor, BytesAt(gradient.address, gradient.bytes));
}

void PushQueue::State::Arrive(uint64_t number) {
  absl::MutexLock lock(&mu);
  if (number >= counted && number - counted < gradients.size()) gradients[number - counted].arrived = true;
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
  const LockFreed unlocked;
  stop()();
  thread_.join();
}

PushQueue::State& PushQueue::Own() const {
  OrThrow(OfThisProcess(process_));
  return *state_;
}

std::function<void()> PushQueue::stop() const {
  return [weak = std::weak_ptr<State>(state_)] {
    const std::shared_ptr<State> state = weak.lock();
    if (state == nullptr) return;
    absl::MutexLock lock(&state->mu);
    state->stopped = true;
    state->hurries = true;
    state->mu.Await(absl::Condition(state.get(), &State::IsIdle));
  };
}

uint64_t PushQueue::Put(uint32_t tensor, Address address, uint64_t bytes) {
  State& state = Own();
  absl::MutexLock lock(&state.mu);
  state.gradients.push_back({.tensor = tensor, .address = address, .bytes = bytes});
  return state.counted + state.gradients.size() - 1;
}

uint64_t PushQueue::CountPut() const {
  State& state = Own();
  absl::MutexLock lock(&state.mu);
  return state.counted + state.gradients.size();
}

void PushQueue::Announce(uint64_t number, Address stream) const {
  static const LaunchHostFunction launch = FindLaunch();
  Own();
  if (launch == nullptr) throw StatusError(absl::UnimplementedError("there is no CUDA driver, libcuda.so.1"));
  // The driver may call when the queue is gone.
  auto arrival = std::make_unique<std::function<void()>>([weak = std::weak_ptr<State>(state_), number] {
    if (const std::shared_ptr<State> state = weak.lock()) state->Arrive(number);
  });
  const HostFunction arrived = [](void* data) {
    const std::unique_ptr<std::function<void()>> call(static_cast<std::function<void()>*>(data));
    (*call)();
  };
  int error = 0;
  {
    const LockFreed unlocked;  // it blocks while the stream has much to do
    error = launch(reinterpret_cast<void*>(stream), arrived, arrival.get());
  }
  if (error != 0) {
    throw StatusError(absl::InternalError(absl::StrCat("the CUDA driver refused cuLaunchHostFunc with error ", error)));
  }
  static_cast<void>(arrival.release());
}

void PushQueue::Arrive(uint64_t number) const { Own().Arrive(number); }

void PushQueue::Cancel(uint64_t number) const {
  State& state = Own();
  absl::MutexLock lock(&state.mu);
  if (number < state.counted || number - state.counted >= state.gradients.size()) return;
  State::Gradient& gradient = state.gradients[number - state.counted];
  gradient.dropped = gradient.arrived = true;
}

uint64_t PushQueue::CountPushed() const {
  State& state = Own();
  absl::MutexLock lock(&state.mu);
  return state.counted;
}

bool PushQueue::AwaitPushed(uint64_t count, double timeout_s) const {
  State& state = Own();
  absl::Status failed;
  bool enough = false;
  {
    const LockFreed unlocked;
    absl::MutexLock lock(&state.mu);
    const auto decided = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return state.counted >= count || !state.failed.ok() || state.stopped;
    };
    state.mu.AwaitWithTimeout(absl::Condition(&decided), absl::Seconds(timeout_s));
    enough = state.counted >= count;
    if (!state.failed.ok()) state.DropAll();
    failed = std::exchange(state.failed, absl::OkStatus());
    if (!enough && state.stopped) failed.Update(ConnectionIsClosed());
  }
  OrThrow(failed);
  return enough;
}

void PushQueue::Drop() const {
  State& state = Own();
  absl::MutexLock lock(&state.mu);
  state.DropAll();
  state.failed = absl::OkStatus();
}

void BindPushQueue(nb::module_& module) {
  using nb::arg;
  nb::class_<PushQueue>(module, "PushQueue")
      .def("put", &PushQueue::Put, arg("tensor"), arg("address"), arg("nbytes"))
      .def("count_put", &PushQueue::CountPut)
      .def("announce", &PushQueue::Announce, arg("number"), arg("stream"))
      .def("arrive", &PushQueue::Arrive, arg("number"))
      .def("cancel", &PushQueue::Cancel, arg("number"))
      .def("count_pushed", &PushQueue::CountPushed)
      .def("await_pushed", &PushQueue::AwaitPushed, arg("count"), arg("timeout_s"))
      .def("drop", &PushQueue::Drop);
}

}  // namespace ballast
