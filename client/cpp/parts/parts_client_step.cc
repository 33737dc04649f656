// The steps of a run on several daemons: the same to all, and one verdict for staged ones.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/merge.h"
#include "client/cpp/parts/parts_client.h"
#include "client/cpp/stream/ready.h"

namespace ballast {
namespace {

// How long the thread waits for one daemon before it looks at the others, one of which may have failed.
constexpr auto kLongestPatience = std::chrono::milliseconds(20);
// How often a caller who waits for a daemon's connection is asked whether to go on.
constexpr absl::Duration kLook = absl::Milliseconds(100);

// What refused the call at once; OK: nothing did, and the future is as it was.
template <typename T>
absl::Status RefusedAtOnce(std::future<absl::StatusOr<T>>* future) {
  if (future->wait_for(std::chrono::seconds(0)) != std::future_status::ready) return absl::OkStatus();
  absl::StatusOr<T> value = future->get();
  if (!value.ok()) return value.status();
  *future = Ready<T>(std::move(value));
  return absl::OkStatus();
}

}  // namespace

// --- the thread ------------------------------------------------------------------------------------------------------

void PartsClient::Work() {
  const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return leaving_ || !tasks_.empty(); };
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&due));
      if (tasks_.empty()) return;  // what was posted is answered, also when the client goes
      task = std::move(tasks_.front());
      tasks_.pop_front();
      working_ = true;
    }
    task();
    absl::MutexLock lock(&mu_);
    working_ = false;
  }
}

void PartsClient::Post(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  tasks_.push_back(std::move(task));
}

void PartsClient::Drain() {
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return tasks_.empty() && !working_; };
  absl::MutexLock lock(&mu_);
  if (leaving_) return;
  stopping_ = true;
  mu_.Await(absl::Condition(&idle));
  stopping_ = false;
}

// The values of all futures, or the first error, or those up to the one that is enough. What is not ready then stays
// behind.
template <typename T, typename IsEnough>
absl::StatusOr<std::vector<T>> PartsClient::AwaitAll(std::vector<std::future<absl::StatusOr<T>>>* futures,
                                                     const IsEnough& is_enough) {
  std::vector<std::optional<T>> values(futures->size());
  for (bool pending = true; pending;) {
    pending = false;
    for (uint32_t part = 0; part < futures->size(); ++part) {
      if (values[part]) continue;
      const auto patience = pending ? std::chrono::milliseconds(0) : kLongestPatience;
      if ((*futures)[part].wait_for(patience) != std::future_status::ready) {
        pending = true;
        continue;
      }
      auto value = (*futures)[part].get();
      if (!value.ok()) return NamedBy(names_[part], value.status());
      if (is_enough(*value)) return std::vector<T>{*std::move(value)};
      values[part] = *std::move(value);
    }
    absl::MutexLock lock(&mu_);
    if (pending && (leaving_ || stopping_)) return absl::CancelledError("the client left while the step was open");
  }
  std::vector<T> all;
  for (auto& value : values) all.push_back(*std::move(value));
  return all;
}

void PartsClient::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  if (status_.ok()) status_ = status;
  ends_sent_ = true;
}

absl::Status PartsClient::status() const {
  if (!attached_) return absl::OkStatus();
  absl::Status first;
  for (uint32_t part = 0; part < parts(); ++part) {
    const absl::Status one = daemons_[part]->status();
    if (RewoundTo(one)) return one;  // then Attach may be called again, whatever the others say
    if (first.ok()) first = NamedBy(names_[part], one);
  }
  absl::MutexLock lock(&mu_);
  return first.ok() ? status_ : first;
}

uint64_t PartsClient::step() const { return attached_ ? daemons_[0]->step() : 0; }

bool PartsClient::shares_gpu() const {
  return attached_ && std::ranges::all_of(daemons_, [](const auto& daemon) { return daemon->shares_gpu(); });
}

// --- a step ----------------------------------------------------------------------------------------------------------

absl::Status PartsClient::CheckOpen(const char* call) const {
  if (!attached_) return NotAttached(call);
  absl::MutexLock lock(&mu_);
  if (!status_.ok()) return status_;
  if (step_ == nullptr || step_->done) return absl::FailedPreconditionError(absl::StrCat(call, " before BeginStep"));
  if (!step_->ended) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(call, " after EndStep; wait for its result, then BeginStep"));
}

// A daemon that is away may come back at an earlier step: then nothing of the next one is anywhere yet.
absl::Status PartsClient::AwaitConnected() const {
  for (uint32_t part = 0; part < parts();) {
    if (daemons_[part]->AwaitConnected(kLook)) {
      ++part;
    } else if (options_.interrupted && options_.interrupted()) {
      return absl::CancelledError(absl::StrCat("interrupted while the daemon at ", names_[part], " was away"));
    }
  }
  return status();
}

absl::Status PartsClient::BeginStep(const StepValues& values) {
  if (!attached_) return NotAttached("BeginStep");
  {
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    if (step_ != nullptr && !step_->done) {
      return absl::FailedPreconditionError("BeginStep while a step is open: wait for the result of its EndStep");
    }
  }
  if (auto s = AwaitConnected(); !s.ok()) return s;
  if (auto s = CheckSameStep(); !s.ok()) return s;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (auto s = daemons_[part]->BeginStep(values); !s.ok()) {
      if (part > 0) Fail(NamedBy(names_[part], s));
      return NamedBy(names_[part], s);
    }
  }
  if (auto s = CheckSameStep(); !s.ok()) return s;  // some may have closed steps meanwhile
  step_ = std::make_shared<Step>();
  return absl::OkStatus();
}

absl::Status PartsClient::CheckSameStep() {
  uint64_t least = std::numeric_limits<uint64_t>::max(), most = 0;
  for (const auto& daemon : daemons_) {
    least = std::min(least, daemon->step());
    most = std::max(most, daemon->step());
  }
  if (least == most) return absl::OkStatus();
  Fail(RewoundError(least - 1, 0,
                    absl::StrCat("the run's daemons are at different steps, ", least, " to ", most,
                                 ", since some have closed steps without this rank; ")));
  return status();
}

absl::Status PartsClient::Push(uint32_t tensor, absl::Span<const std::byte> gradient) {
  const auto place = PlaceOf("Push", tensor);
  return place.ok() ? daemons_[place->part]->Push(place->index, gradient) : place.status();
}

absl::Status PartsClient::EndMicro(std::optional<double> loss, bool next_is_last) {
  if (auto s = CheckOpen("EndMicro"); !s.ok()) return s;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (auto s = daemons_[part]->EndMicro(loss, next_is_last); !s.ok()) return NamedBy(names_[part], s);
  }
  return absl::OkStatus();
}

absl::StatusOr<PartsClient::MeasureFutures> PartsClient::AskMeasures(std::optional<double> loss) {
  MeasureFutures futures;
  for (uint32_t part = 0; part < parts(); ++part) {
    futures.push_back(daemons_[part]->MeasureStep(loss));
    if (auto s = RefusedAtOnce(&futures.back()); !s.ok()) return NamedBy(names_[part], s);
  }
  step_->asked = true;
  return futures;
}

std::future<absl::StatusOr<MeasuredStep>> PartsClient::MeasureStep(std::optional<double> loss) {
  if (auto s = CheckOpen("MeasureStep"); !s.ok()) return Ready<MeasuredStep>(s);
  auto asked = AskMeasures(loss);
  if (!asked.ok()) return Ready<MeasuredStep>(asked.status());
  auto promise = std::make_shared<std::promise<absl::StatusOr<MeasuredStep>>>();
  auto futures = std::make_shared<MeasureFutures>(*std::move(asked));
  Post([this, step = step_, futures, promise] { promise->set_value(TakeMeasures(step.get(), futures.get())); });
  return promise->get_future();
}

absl::StatusOr<MeasuredStep> PartsClient::TakeMeasures(Step* step, MeasureFutures* futures) {
  // One that is over is enough: another may wait for a rank that is to come when this one has ended the step.
  auto measures = AwaitAll(futures, [](const MeasuredStep& measure) { return !measure.measured; });
  if (!measures.ok()) {
    Fail(measures.status());
    return measures.status();
  }
  if (!measures->back().measured && measures->back().applied) {
    Fail(RewoundError(
        this->step(), 0,
        "a daemon has applied this step with what the other ranks brought, since this one was too late; "));
    return status();
  }
  if (!measures->back().measured) {
    return MeasuredStep{.grad_norm = std::numeric_limits<double>::quiet_NaN(), .measured = false};
  }
  step->whole = MergeMeasures(*measures, whole_.placement, tensor_names_);
  return MeasuredStep{.grad_norm = step->whole->grad_norm(), .nonfinite_tensors = step->whole->nonfinite_tensors()};
}

std::future<absl::StatusOr<StepResult>> PartsClient::EndStep(std::optional<double> loss, const StepEndValues& values) {
  if (auto s = CheckOpen("EndStep"); !s.ok()) return Ready<StepResult>(s);
  if (auto s = whole_.limits.CheckEnd(values); !s.ok()) return Ready<StepResult>(s);
  auto promise = std::make_shared<std::promise<absl::StatusOr<StepResult>>>();
  if (whole_.staged() && !values.discard) {
    auto futures = std::make_shared<MeasureFutures>();
    if (!step_->asked) {
      auto asked = AskMeasures(loss);
      if (!asked.ok()) return Ready<StepResult>(asked.status());
      *futures = *std::move(asked);
      loss.reset();
    }
    {
      absl::MutexLock lock(&mu_);
      step_->ended = true;
      ends_sent_ = false;
    }
    Post([this, step = step_, futures, promise, loss, values] {
      Finish(step.get(), EndStaged(step.get(), futures.get(), loss, values), promise.get());
    });
    return promise->get_future();
  }
  auto ends = SendEnds(loss, values);
  if (!ends.ok()) return Ready<StepResult>(ends.status());
  {
    absl::MutexLock lock(&mu_);
    step_->ended = true;
  }
  auto futures = std::make_shared<ResultFutures>(*std::move(ends));
  Post(
      [this, step = step_, futures, promise] { Finish(step.get(), TakeResults(*step, futures.get()), promise.get()); });
  return promise->get_future();
}

absl::StatusOr<StepResult> PartsClient::EndStaged(Step* step, MeasureFutures* measures, std::optional<double> loss,
                                                  StepEndValues values) {
  if (!measures->empty()) {
    if (auto measured = TakeMeasures(step, measures); !measured.ok()) return measured.status();
  }
  values.whole = step->whole;
  values.discard = !step->whole;  // some part has closed the step, or knows that a rank discards it
  auto ends = SendEnds(loss, values);
  if (!ends.ok()) return ends.status();
  {
    absl::MutexLock lock(&mu_);
    ends_sent_ = true;
  }
  return TakeResults(*step, &*ends);
}

absl::StatusOr<PartsClient::ResultFutures> PartsClient::SendEnds(std::optional<double> loss, StepEndValues values) {
  ResultFutures futures;
  values.checkpoint = CheckpointIsDue();
  values.kept_step = shared_checkpoint_.newest();
  for (uint32_t part = 0; part < parts(); ++part) {
    if (part == 1) values.client_state.clear();
    futures.push_back(daemons_[part]->EndStep(loss, values));
    if (auto s = RefusedAtOnce(&futures.back()); !s.ok()) {
      if (part > 0) Fail(NamedBy(names_[part], s));
      return NamedBy(names_[part], s);
    }
  }
  return futures;
}

absl::StatusOr<StepResult> PartsClient::TakeResults(const Step& step, ResultFutures* futures) {
  auto results = AwaitAll(futures, [](const StepResult&) { return false; });
  if (!results.ok()) return results.status();
  std::vector<v1::StepResult> told;
  for (const StepResult& result : *results) told.push_back(result.result);
  for (uint32_t part = 1; part < parts(); ++part) {
    if (told[part].step() == told[0].step()) continue;
    return RewoundError(std::min(told[part].step(), told[0].step()) - 1, 0,
                        absl::StrCat("the run's daemons have closed different steps, ", told[0].step(), " and ",
                                     told[part].step(), ", since some went on without this rank; "));
  }
  StepResult whole{.result = MergeResults(told, whole_.placement, names_, whole_.staged()),
                   .timing = MergeTimings(*results)};
  // Who discards a step has brought no part the whole's.
  if (step.whole && whole.result.reason() == "discarded") whole.result.set_grad_norm(step.whole->grad_norm());
  for (uint32_t part = 0; part < parts(); ++part) {
    for (const uint32_t tensor : (*results)[part].received) {
      whole.received.push_back(whole_.placement.numbers(part)[tensor]);
    }
  }
  std::sort(whole.received.begin(), whole.received.end());
  TellDurable(told, &whole.result);
  durable_step_ = whole.result.durable_step();
  GoBackIfTorn(whole.result, told);
  return whole;
}

// Daemons that come back at different steps go back to a checkpoint that all have.
void PartsClient::TellDurable(const std::vector<v1::StepResult>& told, v1::StepResult* whole) {
  for (uint32_t part = 0; part < parts(); ++part) shared_checkpoint_.Note(part, told[part].checkpoint_step());
  const auto is_durable = [](const v1::StepResult& result) { return result.durable_step() >= result.step(); };
  const bool synced = whole_.spec.checkpoint().durability() == v1::DURABILITY_MODE_JOURNAL_SYNC &&
                      std::all_of(told.begin(), told.end(), is_durable);
  whole->set_durable_step(synced ? whole->step() : shared_checkpoint_.newest());
}

// A part that is torn by itself goes back by itself.
bool PartsClient::GoBackIfTorn(const v1::StepResult& whole, const std::vector<v1::StepResult>& told) {
  const auto torn = [](const v1::StepResult& result) { return result.outcome() == v1::STEP_OUTCOME_PARTIAL; };
  if (rank_ != 0 || whole_.spec.on_torn() != v1::TORN_POLICY_REWIND || !torn(whole)) return false;
  if (std::any_of(told.begin(), told.end(), torn)) return false;
  const absl::Status back = GoBack(whole_.run_id, whole.step() - 1);
  if (!back.ok())
    Log(absl::StrCat("step ", whole.step(), " is torn, and the run cannot be taken back: ", back.message()));
  return back.ok();
}

void PartsClient::Finish(Step* step, absl::StatusOr<StepResult> result,
                         std::promise<absl::StatusOr<StepResult>>* promise) {
  if (!result.ok()) Fail(result.status());
  {
    absl::MutexLock lock(&mu_);
    step->done = true;
  }
  promise->set_value(std::move(result));
}

// Of rank 0, for all: when the run's policy wants one by time, and the last one is written, or was not for long.
bool PartsClient::CheckpointIsDue() {
  const double every_s = whole_.spec.checkpoint().every_seconds();
  if (rank_ != 0 || every_s <= 0) return false;
  const absl::Duration since = SteadyNow() - checkpoint_at_;
  const bool written = durable_step_ >= checkpoint_step_;
  if (since < absl::Seconds(every_s) * (written ? 1 : 2)) return false;
  checkpoint_at_ = SteadyNow();
  checkpoint_step_ = step();
  return true;
}

absl::StatusOr<bool> PartsClient::AwaitWeights(uint32_t tensor, double timeout_s) {
  const auto place = PlaceOf("AwaitWeights", tensor);
  if (!place.ok()) return place.status();
  const absl::Time until = SteadyNow() + absl::Seconds(timeout_s);
  {
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithTimeout(absl::Condition(&ends_sent_), absl::Seconds(timeout_s))) return false;
    if (!status_.ok()) return status_;
  }
  const double left_s = std::max(0.0, absl::ToDoubleSeconds(until - SteadyNow()));
  return daemons_[place->part]->AwaitWeights(place->index, left_s);
}

}  // namespace ballast
