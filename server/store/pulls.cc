#include "server/store/pulls.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

Pulls::Pulls(Environment environment) : environment_(std::move(environment)), copies_(environment_.store) {}

void Pulls::Begin(PullOrder order, std::shared_ptr<WeightSink> sink) {
  const RunSpec& spec = *environment_.spec;
  if (served() >= ReaderCount(spec)) {
    return sink->Finish(absl::ResourceExhaustedError(absl::StrCat(
        served(), " Pulls of run '", spec.run_id, "' are under way, as many as are served at once; ask again soon")));
  }
  const auto source = environment_.source_of(order.step);
  if (!source.ok()) return sink->Finish(source.status());
  const auto job = std::make_shared<PullJob>(&spec, *source, &copies_, std::move(sink), order.series);
  readers_.push_back({.job = job});
  order.digests.empty() ? job->Begin(std::move(order.tensors), std::move(order.slots), std::move(order.parts))
                        : Compare(job, std::move(order));
}

void Pulls::Compare(const std::shared_ptr<PullJob>& job, PullOrder order) {
  environment_.digests->Start([job, order = std::move(order)](const absl::StatusOr<std::vector<uint64_t>>& ours) {
    if (!ours.ok()) return job->Stop(ours.status());
    std::vector<uint32_t> unlike;
    for (size_t i = 0; i < order.tensors.size(); ++i) {
      if ((*ours)[order.tensors[i]] != order.digests[i]) unlike.push_back(order.tensors[i]);
    }
    job->Begin(std::move(unlike), order.slots);
  });
}

size_t Pulls::served() const {
  return static_cast<size_t>(
      std::count_if(readers_.begin(), readers_.end(), [](const Reader& r) { return !r.job->stopped(); }));
}

void Pulls::OnWritten(const WeightSink* sink) {
  for (const Reader& reader : readers_) {
    if (reader.job->sink() == sink) return reader.job->OnWritten();
  }
}

void Pulls::OnGone(const WeightSink* sink) {
  const auto found =
      std::find_if(readers_.begin(), readers_.end(), [&](const Reader& r) { return r.job->sink() == sink; });
  if (found == readers_.end()) return;
  const std::shared_ptr<PullJob> job = found->job;
  readers_.erase(found);
  job->Stop(absl::CancelledError("the reader is gone"));
}

// A reader that reads on within as much time again finds the status behind the chunks it was sent; after that the call
// is cut.
void Pulls::Tick(double now_s) {
  const double patience_s = environment_.spec->pull_timeout_s;
  for (Reader& reader : readers_) {
    if (reader.ended_s > 0 && now_s > reader.ended_s + patience_s) reader.job->sink()->Cancel();
    if (absl::Status overdue = OverdueOf(*reader.job, now_s); !overdue.ok()) reader.job->Stop(std::move(overdue));
    if (reader.job->stopped() && reader.ended_s == 0) reader.ended_s = now_s;
  }
}

// OK, or why the pull is ended.
absl::Status Pulls::OverdueOf(const PullJob& job, double now_s) const {
  const double patience_s = environment_.spec->pull_timeout_s;
  const std::string pull = absl::StrCat("this Pull of run '", environment_.spec->run_id, "' ");
  if (job.waits_since_s() && now_s >= *job.waits_since_s() + patience_s) {
    return absl::UnavailableError(absl::StrCat(pull, "took nothing for ", patience_s,
                                               " s (limits.pull_timeout) and was ended; pull again, and read what "
                                               "comes"));
  }
  if (job.stopped() || !copies_.awaited() || !job.KeepsCopyTooLong(now_s, patience_s)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(pull, "reads a tensor at less than 1 MiB a second, of which the one copy ",
                                             "is kept from others for more than ", patience_s,
                                             " s (limits.pull_timeout); pull again, and read faster"));
}

void Pulls::End(const absl::Status& why) {
  for (const Reader& reader : readers_) reader.job->Stop(why);
}

}  // namespace ballast
