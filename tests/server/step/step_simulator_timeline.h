// What the simulated processes, connections and devices do next, in the order of time; and what is counted meanwhile.
#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/server/step/step_simulator.h"

namespace ballast::sim {

class Timeline {
 public:
  explicit Timeline(uint64_t seed) : random(seed) {}

  Random random;
  SimulatorReport report;

  void Count(Kind kind) { ++report.counts[static_cast<size_t>(kind)]; }
  bool failed() const { return !report.violation.empty(); }
  double now_s() const { return now_s_; }
  double Delay(double most_s) { return most_s * static_cast<double>(Below(&random, 1000)) / 1000; }
  void At(double at_s, std::function<void()> run) { queue_.push({at_s, ++order_, std::move(run)}); }
  void After(double delay_s, std::function<void()> run) { At(now_s_ + delay_s, std::move(run)); }
  bool empty() const { return queue_.empty(); }
  double next_s() const { return queue_.top().at_s; }
  void PassTo(double at_s) { now_s_ = std::max(now_s_, at_s); }
  void RunNext() {
    const Action action = queue_.top();
    queue_.pop();
    PassTo(action.at_s);
    action.run();
  }
  // A number that nothing else has: of a process, a connection, a session.
  uint64_t NewNumber() { return ++numbers_; }

 private:
  struct Action {
    double at_s;
    uint64_t order;
    std::function<void()> run;
    bool operator<(const Action& other) const { return std::tie(other.at_s, other.order) < std::tie(at_s, order); }
  };
  std::priority_queue<Action> queue_;
  double now_s_ = 0;
  uint64_t order_ = 0, numbers_ = 0;
};

}  // namespace ballast::sim
