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
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"

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
  bool Take(Task* task);  // false: it has stopped
  void Loop();
  void RunAll(std::vector<Task>* batch);

  Options options_;
  // The standard library's, whose waits go by the steady clock: see stop_signal.h.
  std::mutex mu_;  // of the next three
  std::condition_variable ready_;
  std::vector<Task> posted_;
  bool stopping_ = false, stopped_ = false;
  std::atomic<double> busy_since_s_ = 0;
  std::thread thread_;
};

}  // namespace ballast
