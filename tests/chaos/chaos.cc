#include "tests/chaos/chaos.h"

#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "tests/chaos/chaos_proxy.h"
#include "tests/chaos/chaos_rank.h"
#include "tests/client/real_daemon.h"

namespace ballast {
namespace {

using chaos::kRun;
using chaos::kWorld;

// Value of the run's series; `label`: one that sorts before run_id. Nothing: there is no such series.
std::optional<double> Metric(const std::string& exposition, const std::string& name, const std::string& label) {
  const std::string series = absl::StrCat("\n", name, "{", label, "run_id=\"", kRun, "\"} ");
  const size_t at = exposition.find(series);
  if (at == std::string::npos) return std::nullopt;
  const size_t from = at + series.size();
  double value = 0;
  if (!absl::SimpleAtod(exposition.substr(from, exposition.find('\n', from) - from), &value)) return std::nullopt;
  return value;
}

struct Training {
  std::string failure, metrics;
  std::vector<chaos::Weights> weights;  // by rank
};

// Each rank by way of its address; `begin` once they have joined.
Training Train(const ChaosOptions& options, const RealDaemon& daemon, const std::vector<std::string>& addresses,
               const std::function<void()>& begin) {
  Training made;
  std::vector<std::unique_ptr<chaos::Rank>> ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(options.forgetful && r > 0 ? chaos::MakeForgetfulRank(options, r)
                                               : chaos::MakeClientRank(options, r));
    if (const absl::Status joined = ranks[r]->Join(addresses[r]); !joined.ok()) {
      made.failure = joined.ToString();
      return made;
    }
  }
  begin();
  std::vector<absl::Status> statuses(kWorld);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kWorld; ++r) {
    threads.emplace_back([&, r] {
      for (uint64_t step = 1; step <= options.steps && statuses[r].ok(); ++step) statuses[r] = ranks[r]->Step(step);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t r = 0; r < kWorld; ++r) {
    if (!statuses[r].ok()) absl::StrAppend(&made.failure, "rank ", r, ": ", statuses[r].ToString(), "\n");
    made.weights.push_back(ranks[r]->weights());
  }
  made.metrics = daemon.metrics();
  return made;
}

// What is wrong with the counts of a training of so many steps; empty: nothing.
std::string WrongCounts(const ChaosOptions& options, const std::string& metrics) {
  std::string wrong;
  const auto expect = [&](const char* name, const char* label, double wanted) {
    const auto got = Metric(metrics, name, label);
    if (got == wanted) return;
    absl::StrAppend(&wrong, name, label, " is ", got ? absl::StrCat(*got) : "missing", ", not ", wanted, "\n");
  };
  expect("ballast_steps_applied_total", "", static_cast<double>(options.steps));
  expect("ballast_step", "", static_cast<double>(options.steps));
  for (const char* family : {"ballast_steps_partial_total", "ballast_steps_aborted_total"}) {
    for (const char* reason : {"restarted", "rank_lost", "data_loss", "timeout", "other"}) {
      expect(family, absl::StrCat("reason=\"", reason, "\",").c_str(), 0);
    }
  }
  expect("ballast_chunks_duplicate_total", "match=\"different\",", 0);
  for (const char* reason : {"checksum", "bounds", "unknown_tensor", "too_large", "malformed"}) {
    expect("ballast_chunks_rejected_total", absl::StrCat("reason=\"", reason, "\",").c_str(), 0);
  }
  return wrong;
}

// A training moves about 400 KB a step and rank, and more the more it is cut.
uint64_t MeanBytes(const ChaosOptions& options) { return 400'000 * kWorld * options.steps / options.cuts; }

}  // namespace

ChaosReport RunChaos(const ChaosOptions& options) {
  ChaosReport report;
  Config config = RealDaemon::Small();
  if (options.forgetful) config.limits.credit_bytes = 1 << 20;  // twice 2 * 226 KB
  RealDaemon daemon(config), calm(config);
  Training cut;
  {
    std::vector<std::unique_ptr<ChaosProxy>> proxies;
    std::vector<std::string> addresses;
    for (uint32_t r = 0; r < kWorld; ++r) {
      proxies.push_back(std::make_unique<ChaosProxy>(ChaosProxy::Options{
          .target = daemon.address(), .seed = chaos::Mix(options.seed, r), .mean_bytes = MeanBytes(options)}));
      addresses.push_back(proxies[r]->address());
    }
    cut = Train(options, daemon, addresses, [&] {
      for (const auto& proxy : proxies) proxy->Begin();
    });
    for (const auto& proxy : proxies) {
      report.cuts += proxy->counts().cuts;
      report.late += proxy->counts().late;
    }
  }
  report.duplicates =
      static_cast<uint64_t>(Metric(cut.metrics, "ballast_chunks_duplicate_total", "match=\"same\",").value_or(0));
  const Training uncut = Train(options, calm, {calm.address(), calm.address()}, [] {});
  std::string wrong = absl::StrCat(cut.failure, uncut.failure);
  if (wrong.empty()) wrong = absl::StrCat(WrongCounts(options, cut.metrics), WrongCounts(options, uncut.metrics));
  if (wrong.empty() && (cut.weights != uncut.weights || cut.weights[0] != cut.weights[1])) wrong = "other weights";
  if (report.cuts < options.cuts) absl::StrAppend(&wrong, report.cuts, " cuts, fewer than ", options.cuts);
  if (options.forgetful && report.duplicates * 10 < report.cuts)
    absl::StrAppend(&wrong, "only ", report.duplicates, " duplicates");
  if (!wrong.empty()) report.failure = absl::StrCat("seed ", options.seed, ": ", wrong);
  return report;
}

}  // namespace ballast
