// Which runs count for whom, and whether a caller's quota has room for one more.
//
// A run is a grant's where the grant's patterns cover its name, whoever made it: nothing about its maker need be kept on
// the disk, the count is right after a restart and when a token is replaced, and what an operator makes under a team's
// name takes that team's room. Without an access file a run is of who created it, or, where it was read back from the
// disk, of who first asks for it again: trainers do, when they come back.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/access/access_list.h"
#include "server/base/saturating.h"
#include "server/base/status_macros.h"
#include "server/run/run_registry.h"

namespace ballast {
namespace {

constexpr size_t kMostNamed = 8;

}  // namespace

void RunRegistry::Claim(const std::string& run_id, const Payer& payer) {
  if (payer.grant == nullptr && !payer.name.empty()) payers_.try_emplace(run_id, payer.name);
}

std::vector<RunRegistry::Counted> RunRegistry::OthersOf(const Payer& payer, const std::string& run_id) const {
  std::vector<Counted> others;
  const auto count = [&](const std::string& id, bool claimed, uint64_t bytes) {
    const bool its = payer.grant != nullptr ? payer.grant->Covers(id) : claimed;
    if (its && id != run_id) others.push_back({id, bytes});
  };
  for (const auto& run : All()) {
    const auto of = payers_.find(run->spec().run_id);
    count(run->spec().run_id, of != payers_.end() && of->second == payer.name, run->plan().bytes.total());
  }
  for (const auto& [id, making] : making_) {
    count(id, making->request.payer.name == payer.name, making->plan.bytes.total());
  }
  return others;
}

absl::Status RunRegistry::AdmitQuota(const Payer& payer, const RunSpec& spec, bool amends) const {
  const Quota& quota = payer.quota;
  if (payer.name.empty() || (quota.runs == 0 && quota.bytes == 0)) return absl::OkStatus();
  const std::vector<Counted> others = OthersOf(payer, spec.run_id);
  if (quota.runs > 0 && others.size() >= quota.runs && !amends) {
    const size_t named = std::min(others.size(), kMostNamed);
    const auto name = [](std::string* out, const Counted& run) { absl::StrAppend(out, run.run_id); };
    const auto end = others.begin() + static_cast<ptrdiff_t>(named);
    return options_.quotas->Refuse(
        payer.name, QuotaKind::kRuns,
        absl::StrCat("run '", spec.run_id, "' would be one more than the ", quota.runs, " runs that ", payer.name,
                     " may have (", payer.KeyOf(QuotaKind::kRuns), "); it has ", others.size(), ": ",
                     absl::StrJoin(others.begin(), end, ", ", name),
                     others.size() > named ? absl::StrCat(" and ", others.size() - named, " more") : "",
                     "; delete one (`ballastctl delete RUN`), or ask the daemon's operator for more"));
  }
  if (quota.bytes == 0) return absl::OkStatus();
  uint64_t used = 0;
  for (const Counted& run : others) Add(&used, run.bytes);
  const uint64_t wanted = MakePlan(spec).bytes.total();
  if (Sum(used, wanted) <= quota.bytes) return absl::OkStatus();
  return options_.quotas->Refuse(
      payer.name, QuotaKind::kBytes,
      absl::StrCat("run '", spec.run_id, "' needs ", wanted, " bytes, and ", payer.name, " uses ", used, " of the ",
                   quota.bytes, " that it may (", payer.KeyOf(QuotaKind::kBytes),
                   "); choose a smaller state or master format, delete a run, or ask the daemon's operator for more"));
}

}  // namespace ballast
