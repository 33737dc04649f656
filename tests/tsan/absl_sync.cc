// Tells the thread sanitizer of absl's locks. The distribution's absl is compiled without it, so that all that a Mutex guards
// would be reported as raced for. This library stands between the programs of preset tsan and that one: it defines the functions
// that the programs call, each of which says what it does and calls the function that it stands for.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

// A member function's address, which g++ gives as an extension.
#pragma GCC diagnostic ignored "-Wpmf-conversions"

namespace {

// The function of the same name in the libraries that follow this one.
void* Next(void* here) {
  Dl_info info{};
  void* const next = dladdr(here, &info) != 0 && info.dli_sname != nullptr ? dlsym(RTLD_NEXT, info.dli_sname) : nullptr;
  if (next != nullptr) return next;
  std::fprintf(stderr, "tests/tsan: absl has no function that this one stands for\n");
  std::abort();
}

template <typename Function>
Function* NextOf(Function* here) {
  return reinterpret_cast<Function*>(Next(reinterpret_cast<void*>(here)));
}

// absl's functions call each other, through this library: what the outermost says is enough. In there absl evaluates
// conditions, those of other threads too, while it holds a lock: from a "pre" call to its "post" call nothing is looked at.
thread_local int within_absl = 0;

template <typename Call>
auto WithinAbsl(const Call& call) {
  ++within_absl;
  __tsan_mutex_pre_signal(&within_absl, 0);
  const auto answer = call();
  __tsan_mutex_post_signal(&within_absl, 0);
  --within_absl;
  return answer;
}

template <typename Wait>
auto AsUnlocked(void* mutex, const Wait& wait) {
  if (within_absl > 0) return wait();
  __tsan_mutex_pre_unlock(mutex, 0);
  const auto answer = WithinAbsl(wait);
  __tsan_mutex_post_unlock(mutex, 0);
  __tsan_mutex_pre_lock(mutex, 0);
  __tsan_mutex_post_lock(mutex, 0, 0);
  return answer;
}

// Notification::notified_yet_, which HasBeenNotified, an inline function, loads by itself.
void* FlagOf(const absl::Notification* notification) {
  return const_cast<char*>(reinterpret_cast<const char*>(notification)) + sizeof(absl::Mutex);
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto next = NextOf(reinterpret_cast<void (*)(Mutex*)>(&Mutex::Lock));
  if (within_absl > 0) return next(this);
  __tsan_mutex_pre_lock(this, 0);
  next(this);
  __tsan_mutex_post_lock(this, 0, 0);
}

void Mutex::Unlock() {
  static const auto next = NextOf(reinterpret_cast<void (*)(Mutex*)>(&Mutex::Unlock));
  if (within_absl > 0) return next(this);
  __tsan_mutex_pre_unlock(this, 0);
  WithinAbsl([&] { return next(this), true; });
  __tsan_mutex_post_unlock(this, 0);
}

void Mutex::Await(const Condition& condition) {
  static const auto next = NextOf(reinterpret_cast<void (*)(Mutex*, const Condition&)>(&Mutex::Await));
  AsUnlocked(this, [&] { return next(this, condition), true; });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto next =
      NextOf(reinterpret_cast<bool (*)(Mutex*, const Condition&, Duration)>(&Mutex::AwaitWithTimeout));
  return AsUnlocked(this, [&] { return next(this, condition, timeout); });
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static const auto next =
      NextOf(reinterpret_cast<bool (*)(Mutex*, const Condition&, Time)>(&Mutex::AwaitWithDeadline));
  return AsUnlocked(this, [&] { return next(this, condition, deadline); });
}

void Notification::Notify() {
  static const auto next = NextOf(reinterpret_cast<void (*)(Notification*)>(&Notification::Notify));
  __tsan_release(FlagOf(this));
  WithinAbsl([&] { return next(this), true; });
}

void Notification::WaitForNotification() const {
  static const auto next = NextOf(reinterpret_cast<void (*)(const Notification*)>(&Notification::WaitForNotification));
  WithinAbsl([&] { return next(this), true; });
  __tsan_acquire(FlagOf(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  static const auto next =
      NextOf(reinterpret_cast<bool (*)(const Notification*, Duration)>(&Notification::WaitForNotificationWithTimeout));
  const bool notified = WithinAbsl([&] { return next(this, timeout); });
  if (notified) __tsan_acquire(FlagOf(this));
  return notified;
}

bool BlockingCounter::DecrementCount() {
  static const auto next = NextOf(reinterpret_cast<bool (*)(BlockingCounter*)>(&BlockingCounter::DecrementCount));
  __tsan_release(this);
  return WithinAbsl([&] { return next(this); });
}

void BlockingCounter::Wait() {
  static const auto next = NextOf(reinterpret_cast<void (*)(BlockingCounter*)>(&BlockingCounter::Wait));
  WithinAbsl([&] { return next(this), true; });
  __tsan_acquire(this);
}

ABSL_NAMESPACE_END
}  // namespace absl
