#include "server/store/completions.h"

#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

struct Completions::Answer {
  std::shared_ptr<Arrivals> arrivals;
  Done done;
  TaskResult result = {};
};

class Completions::Arrivals {
 public:
  explicit Arrivals(Strand* strand) : strand_(strand) {}

  void Add(std::unique_ptr<Answer> answer) {
    std::shared_ptr<Arrivals> self = answer->arrivals;
    {
      absl::MutexLock lock(&mu_);
      arrived_.push_back(std::move(answer));
      if (arrived_.size() > 1) return;  // it goes with the first
    }
    strand_->Post([self = std::move(self)] { self->RunAll(); });
  }
  Strand* strand() const { return strand_; }

 private:
  void RunAll() {
    std::vector<std::unique_ptr<Answer>> answers;
    {
      absl::MutexLock lock(&mu_);
      answers.swap(arrived_);
    }
    for (std::unique_ptr<Answer>& answer : answers) {
      answer->done(answer->result);
      answer.reset();
    }
  }

  Strand* const strand_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Answer>> arrived_ ABSL_GUARDED_BY(mu_);
};

Completions::Completions(Strand* strand) : arrivals_(std::make_shared<Arrivals>(strand)) {}

DeviceQueue::Completion Completions::OnStrand(Done done) {
  std::unique_ptr<Answer> answer(new Answer{.arrivals = arrivals_, .done = std::move(done)});
  return [answer = std::move(answer)](const TaskResult& result) mutable {
    answer->result = result;
    Arrivals* const arrivals = answer->arrivals.get();
    arrivals->Add(std::move(answer));
  };
}

void Completions::Post(Strand::Task task) {
  arrivals_->strand()->Post([task = std::move(task), kept = arrivals_]() mutable { task(); });
}

}  // namespace ballast
