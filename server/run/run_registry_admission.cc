// Whether there is room for one run more, and what to do where there is not.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

#include "kernels/matrix/product.h"
#include "server/base/clock.h"
#include "server/base/status_macros.h"
#include "server/run/run_registry.h"

namespace ballast {
namespace {

constexpr uint64_t kMostSeries = Metrics::kMostSeries;

// Whole seconds, 0 too with its unit.
std::string DescribeSeconds(double s) {
  const absl::Duration whole = absl::Trunc(absl::Seconds(s), absl::Seconds(1));
  return whole == absl::ZeroDuration() ? "0s" : absl::FormatDuration(whole);
}

// Those without a trainer and since when, the longest first: "without a trainer: 'a' for 3h12m0s, 'b' for 5s and 4 more; ".
std::string DescribeIdle(const std::vector<std::shared_ptr<Run>>& runs) {
  constexpr size_t kMostNamed = 8;
  std::vector<std::pair<double, std::string>> idle;
  for (const auto& run : runs) {
    if (const auto since_s = run->Status().unattended_since_s) idle.emplace_back(*since_s, run->spec().run_id);
  }
  if (idle.empty()) return "all have a trainer; ";
  std::sort(idle.begin(), idle.end());
  const size_t more = idle.size() - std::min(idle.size(), kMostNamed);
  idle.resize(idle.size() - more);
  const double now_s = MonotonicSeconds();
  const auto describe = [&](std::string* out, const std::pair<double, std::string>& run) {
    absl::StrAppend(out, "'", run.second, "' for ", DescribeSeconds(now_s - run.first));
  };
  const std::string others = more > 0 ? absl::StrCat(" and ", more, " more; ") : "; ";
  return absl::StrCat("without a trainer: ", absl::StrJoin(idle, ", ", describe), others);
}

// What makes room whatever is short, to stand before the limit to raise.
std::string DescribeDeleting(const std::vector<std::shared_ptr<Run>>& runs, bool tells_of_all) {
  return absl::StrCat("; ", tells_of_all ? DescribeIdle(runs) : "", "delete one (`ballastctl delete RUN`), ");
}

RunShape ShapeOf(const RunSpec& spec) {
  return {.layers = spec.layers.size(),
          .ranks = spec.ranks,
          .two_components = HasPairedMaster(spec),
          .durable = spec.checkpoints.has_value(),
          .followed = spec.follow.has_value()};
}

}  // namespace

std::string RunRegistry::DescribeBytes(const PlanBytes& b) {
  std::vector<std::string> kinds;
  for (const ByteKind& kind : kByteKinds) kinds.push_back(absl::StrCat(kind.name, " ", b.*kind.bytes));
  return absl::StrCat(b.total() == kUncountable ? "at least " : "", b.total(), " bytes (", absl::StrJoin(kinds, ", "),
                      ")");
}

absl::StatusOr<Placement> RunRegistry::Admit(const RunSpec& spec) const {
  if (draining()) {
    options_.metrics->OnAdmissionRejected("draining");
    return absl::UnavailableError("the daemon is shutting down; no new run begins");
  }
  RETURN_IF_ERROR(AdmitOneMore(spec));
  RETURN_IF_ERROR(AdmitRules(spec));
  RETURN_IF_ERROR(AdmitSeries(spec));
  return AdmitMemory(spec);
}

absl::Status RunRegistry::AdmitRules(const RunSpec& spec) const {
  if (!HasMatrices(spec)) return absl::OkStatus();
  const auto refusal = [&](absl::string_view why) {
    options_.metrics->OnAdmissionRejected("rule");
    return absl::FailedPreconditionError(absl::StrCat("run '", spec.run_id, "' has a rule over matrices, ", why));
  };
  const std::vector<DevicePool::State> states = options_.devices->Read();
  std::string all;  // have these
  for (size_t d = 0; d < states.size(); ++d) {
    if (!states[d].failure.ok()) continue;  // no run comes to it
    const absl::StatusOr<std::string> products = options_.devices->at(d)->MatrixProducts();
    if (!products.ok()) {
      return refusal(absl::StrCat("which this daemon cannot multiply: ", products.status().message(),
                                  "; start it with device = cpu, or choose another rule"));
    }
    if (!all.empty() && all != *products) {
      return refusal(absl::StrCat("whose bits would be those of the GPU that it is placed on, ", all, " or ", *products,
                                  "; start a daemon for each kind of GPU"));
    }
    all = *products;
  }
  return absl::OkStatus();
}

absl::Status RunRegistry::AdmitOneMore(const RunSpec& spec) const {
  const std::vector<std::shared_ptr<Run>> all = All();
  const size_t there = all.size() + making_.size();
  if (there < options_.max_runs) return absl::OkStatus();
  options_.metrics->OnAdmissionRejected("max_runs");
  return absl::ResourceExhaustedError(
      absl::StrCat("run '", spec.run_id, "' would be run number ", there + 1, ", and max_runs is ", options_.max_runs,
                   DescribeDeleting(all, options_.tells_of_all),
                   "raise max_runs (BALLAST_MAX_RUNS where a trainer starts its daemon), or set idle_run_timeout"));
}

absl::StatusOr<Placement> RunRegistry::AdmitMemory(const RunSpec& spec) const {
  const std::optional<uint64_t> host_free = options_.devices->host_free_bytes();
  if (auto placement = ChoosePlacement(spec, options_.devices->FreeBytes(), host_free)) return *std::move(placement);
  options_.metrics->OnAdmissionRejected("memory");
  return absl::ResourceExhaustedError(
      absl::StrCat("run '", spec.run_id, "' needs ", DescribeBytes(MakePlan(spec).bytes), ", ", DescribeRoom(),
                   "; delete a run, choose a smaller state or master format, ",
                   spec.snapshots > 0 ? "keep fewer snapshots, " : "", "or raise memory_limit"));
}

std::string RunRegistry::DescribeRoom() const {
  std::string room =
      absl::StrJoin(options_.devices->Read(), "; ", [&](std::string* out, const DevicePool::State& state) {
        if (options_.devices->size() > 1) absl::StrAppend(out, state.label, " has ");
        absl::StrAppend(out, state.free_bytes(), " of ", state.limit_bytes, " free",
                        state.failure.ok() ? "" : " (failed)");
      });
  if (const std::optional<uint64_t> host_free = options_.devices->host_free_bytes()) {
    absl::StrAppend(&room, "; the host has ", *host_free, " of ", *options_.devices->host_limit_bytes(),
                    " free for snapshots and client_state");
  }
  return room;
}

absl::Status RunRegistry::AdmitSeries(const RunSpec& spec) const {
  const uint64_t mine = Metrics::SeriesOfRun(ShapeOf(spec));
  const std::vector<std::shared_ptr<Run>> runs = All();
  uint64_t all = mine;
  for (const auto& run : runs) {
    if (run->spec().run_id != spec.run_id) all += Metrics::SeriesOfRun(ShapeOf(run->spec()));
  }
  for (const auto& [_, making] : making_) all += Metrics::SeriesOfRun(ShapeOf(making->request.spec));
  if (all <= kMostSeries) return absl::OkStatus();
  options_.metrics->OnAdmissionRejected("series");
  return absl::ResourceExhaustedError(absl::StrCat("run '", spec.run_id, "' needs ", mine, " metric series, ",
                                                   kMostSeries - std::min(kMostSeries, all - mine), " of ", kMostSeries,
                                                   " free", DescribeDeleting(runs, options_.tells_of_all),
                                                   "lower limits.layer_groups (BALLAST_LIMITS_LAYER_GROUPS where a "
                                                   "trainer starts its daemon), or set idle_run_timeout"));
}

}  // namespace ballast
