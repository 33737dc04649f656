// A serial executor: one thread that runs what is posted, in order, and a tick at least every tick_s. All decisions of
// a run are taken on its strand, so what lives there needs no locks.
//
//   Strand strand({.name = "run:r1", .tick_s = 0.25, .tick = [] {...}});
//   strand.Post([] {...});
//   strand.Stop();                 // runs what was posted before, then joins
//
// After Stop a posted task runs at once on the caller's thread: it finds that its owner has ended and answers so, so
// that nobody waits for a reply that cannot come. Thread-safe; call Stop once, not from the strand itself.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class Strand {
 public:
  using Task = absl::AnyInvocable<void()>;
  struct Options {
    std::string name;  // of the thread
    double tick_s = 0.25;
    absl::AnyInvocable<void()> tick = nullptr;  // may be empty
    // After tasks that were taken together, before the tick: what many of them want done is done once. May be empty.
    absl::AnyInvocable<void()> after = nullptr;
  };

  explicit Strand(Options options);  // throws NoThread (start_thread.h)
  ~Strand();
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;

  void Post(Task task);
  void Stop();
  // For how long the task in hand has been running, since it last said that it gets on; 0 when idle.
  double busy_s() const;
  // Says so, of a task that is long, from any thread that works for it.
  void Progress();

 private:
  void Loop();
  void RunAll(std::vector<Task>* batch);

  Options options_;
  absl::Mutex mu_;
  std::vector<Task> posted_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<double> busy_since_s_ = 0;
  std::thread thread_;
};

}  // namespace ballast
