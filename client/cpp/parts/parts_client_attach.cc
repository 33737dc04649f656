// Taking a rank on all daemons of a run, and bringing daemons together that are at different steps.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/merge.h"
#include "client/cpp/parts/parts_client.h"
#include "client/cpp/parts/step_of_all.h"
#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

// How often a rank looks whether the daemons are at the same step again.
constexpr absl::Duration kLookEvery = absl::Milliseconds(200);
// Each round brings some daemon to another step, and others' rounds may come in between.
constexpr int kMostRounds = 20;
// How often what there is to go back to is looked for: it may be retired before a daemon is told.
constexpr int kMostLooks = 5;
// How soon a part is asked again that finishes a step without this rank.
constexpr absl::Duration kFinishing = absl::Milliseconds(100);

// Of the parts that have one.
std::vector<v1::StepResult> LastResults(const std::vector<Attachment>& attachments) {
  std::vector<v1::StepResult> results;
  for (const Attachment& attachment : attachments) {
    if (attachment.last_result) results.push_back(*attachment.last_result);
  }
  return results;
}

}  // namespace

absl::StatusOr<Attachment> PartsClient::AttachPart(uint32_t part, AttachOptions options) {
  const std::vector<std::string> hashes = absl::StrSplit(options.spec_sha256, ',');
  options.spec_sha256 = hashes.size() == parts() ? hashes[part] : "";
  options.shards = SplitShards(whole_.placement, options.shards)[part];
  options.takeover = options.takeover || held_[part];
  options.gradient_buffer_bytes /= parts();
  auto attachment = daemons_[part]->Attach(options);
  if (attachment.ok()) held_[part] = true;
  return attachment;
}

absl::StatusOr<std::vector<Attachment>> PartsClient::AttachAll(const AttachOptions& options) {
  auto whole = Look(options.run_id);
  if (!whole.ok()) return whole.status();
  whole_ = *std::move(whole);
  if (options.shards.size() > whole_.placement.tensors()) {
    return absl::InvalidArgumentError(absl::StrCat("Attach with shards of ", options.shards.size(),
                                                   " tensors, but the run has ", whole_.placement.tensors()));
  }
  for (const auto& daemon : daemons_) daemon->DetachForNow();
  Attachments attachments(parts());
  if (auto s = AttachEach(options, &attachments); !s.ok()) return s;
  std::vector<Attachment> all;
  for (auto& attachment : attachments) all.push_back(*std::move(attachment));
  return all;
}

absl::Status PartsClient::AttachEach(const AttachOptions& options, Attachments* attachments) {
  std::vector<uint64_t> from_steps(parts());
  AttachOptions asks = options;
  asks.awaits_step = false;
  for (const absl::Time give_up = SteadyNow() + absl::Seconds(options.join_timeout_s);;) {
    absl::Status finishing;
    if (auto s = AttachMissing(asks, from_steps, attachments, &finishing); !s.ok()) return s;
    if (finishing.ok()) return absl::OkStatus();
    if (SteadyNow() > give_up) {
      return absl::UnavailableError(absl::StrCat(finishing.message(), "; it was not over within ",
                                                 options.join_timeout_s,
                                                 " s: see what its ranks wait for, or raise join_timeout_s"));
    }
    if (auto s = CloseBesides(options.run_id, &from_steps, attachments); !s.ok()) return s;
    if (options_.interrupted && options_.interrupted()) {
      return absl::CancelledError("interrupted while a daemon of the run finished a step");
    }
    absl::SleepFor(kFinishing);
  }
}

absl::Status PartsClient::AttachMissing(const AttachOptions& options, const std::vector<uint64_t>& from_steps,
                                        Attachments* attachments, absl::Status* finishing) {
  const auto asked = ForAll(parts(), [&](uint32_t part) {
    const auto& known = (*attachments)[part];
    AttachOptions asks = options;
    asks.from_step = from_steps[part];
    return known ? absl::StatusOr<Attachment>(*known) : AttachPart(part, asks);
  });
  for (uint32_t part = 0; part < parts(); ++part) {
    const absl::Status& status = asked[part].status();
    if (status.ok()) {
      (*attachments)[part] = *asked[part];
    } else if (absl::IsUnavailable(status) && RetryAfter(status)) {
      *finishing = NamedBy(names_[part], status);
    } else {
      return NamedBy(names_[part], status);
    }
  }
  return absl::OkStatus();
}

absl::Status PartsClient::CloseBesides(const std::string& run_id, std::vector<uint64_t>* from_steps,
                                       Attachments* attachments) {
  const auto runs = AskRuns(run_id);
  if (!runs.ok()) return runs.status();
  const auto open = [&](uint32_t part) { return (*runs)[part].status().step() + 1; };
  for (uint32_t part = 0; part < parts(); ++part) {
    for (uint32_t other = 0; other < parts(); ++other) {
      if ((*attachments)[part] || !(*attachments)[other] || open(other) != open(part)) continue;
      daemons_[other]->DetachForNow();
      (*attachments)[other].reset();
      (*from_steps)[other] = open(part) + 1;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Attachment> PartsClient::Attach(const AttachOptions& given) {
  const auto rewound_to = RewoundTo(status());
  if (attached_ && !rewound_to) {
    return absl::FailedPreconditionError("this client is attached already; one client holds one rank of one run");
  }
  AttachOptions options = given;
  if (rewound_to) options.again_step = *rewound_to + 1;
  Drain();
  attached_ = false;
  if (options.run_id != whole_.run_id || options.rank != rank_) held_.assign(parts(), false);
  rank_ = options.rank;
  for (int round = 0; round < kMostRounds; ++round) {
    auto attachments = AttachAll(options);
    options.again_step = 0;
    const auto again = attachments.ok() ? Align(options, &*attachments) : absl::StatusOr<bool>(attachments.status());
    if (!again.ok() && RewoundTo(again.status())) continue;  // another rank has taken the run back meanwhile
    if (!again.ok()) {
      for (const auto& daemon : daemons_) daemon->Detach();
      return again.status();
    }
    if (!*again) return OnAttached(*attachments);
  }
  return absl::UnavailableError(absl::StrCat("run '", options.run_id, "' was taken back ", kMostRounds,
                                             " times while this rank attached to its daemons: attach again"));
}

Attachment PartsClient::OnAttached(const std::vector<Attachment>& attachments) {
  {
    absl::MutexLock lock(&mu_);
    status_ = absl::OkStatus();
    ends_sent_ = true;
  }
  attached_ = true;
  step_.reset();
  tensor_names_.clear();
  for (const v1::TensorSpec& tensor : whole_.spec.tensors()) tensor_names_.push_back(tensor.name());
  checkpoint_at_ = SteadyNow();
  checkpoint_step_ = durable_step_ = 0;
  shared_checkpoint_ = SharedCheckpoint(parts());
  Attachment whole = Merge(attachments);
  if (whole.last_result) TellDurable(LastResults(attachments), &*whole.last_result);
  return whole;
}

Attachment PartsClient::Merge(const std::vector<Attachment>& attachments) const {
  Attachment whole = attachments[0];
  std::vector<uint64_t> generations;
  whole.digests.assign(whole_.placement.tensors(), 0);
  bool digests = true;
  for (uint32_t part = 0; part < parts(); ++part) {
    const Attachment& one = attachments[part];
    whole.weights_loaded = whole.weights_loaded && one.weights_loaded;
    generations.push_back(one.generation);
    const std::vector<uint32_t>& numbers = whole_.placement.numbers(part);
    digests = digests && one.digests.size() == numbers.size();
    for (size_t i = 0; digests && i < numbers.size(); ++i) whole.digests[numbers[i]] = one.digests[i];
  }
  if (!digests) whole.digests.clear();
  whole.generation = MergeGenerations(generations);
  whole.last_result.reset();
  if (const auto results = LastResults(attachments); results.size() == parts()) {
    whole.last_result = MergeResults(results, whole_.placement, names_, whole_.staged());
  }
  return whole;
}

void PartsClient::Detach() {
  Drain();
  attached_ = false;
  step_.reset();
  held_.assign(parts(), false);
  ForAll(parts(), [this](uint32_t part) {
    daemons_[part]->Detach();
    return 0;
  });
}

// --- different steps -------------------------------------------------------------------------------------------------

absl::StatusOr<bool> PartsClient::CloseBehind(const AttachOptions& options, uint64_t next,
                                              std::vector<Attachment>* attachments) {
  AttachOptions later = options;
  later.from_step = next;
  for (uint32_t part = 0; part < parts(); ++part) {
    if ((*attachments)[part].resume_step == next) continue;
    daemons_[part]->Detach();
    auto again = AttachPart(part, later);
    if (!again.ok()) return NamedBy(names_[part], again.status());
    (*attachments)[part] = *std::move(again);
  }
  const auto elsewhere = [&](const Attachment& a) { return a.resume_step != next; };
  if (std::any_of(attachments->begin(), attachments->end(), elsewhere)) return true;
  return GoBackIfTorn(Merge(*attachments), *attachments);
}

absl::StatusOr<bool> PartsClient::Align(const AttachOptions& options, std::vector<Attachment>* attachments) {
  const auto earlier = [](const Attachment& a, const Attachment& b) { return a.resume_step < b.resume_step; };
  const auto [least, most] = std::minmax_element(attachments->begin(), attachments->end(), earlier);
  const uint64_t first = least->resume_step, last = most->resume_step;
  if (first == last) return GoBackIfTorn(Merge(*attachments), *attachments);  // as another rank has made it so
  if (last - first == 1) {
    // A step that some have closed without the others: torn, as a step that a lost process leaves. Of several ranks,
    // another one may be closing it on the others right now: then it is gone back from when all have.
    const bool alone = options.world == 1 && whole_.spec.on_torn() == v1::TORN_POLICY_REWIND;
    if (alone && GoBack(options.run_id, first - 1).ok()) return true;
    return CloseBehind(options, last, attachments);
  }
  Log(absl::StrCat("the daemons of run '", options.run_id, "' are at different steps, ", first - 1, " to ", last - 1,
                   ": it goes back to one that all have"));
  if (rank_ == 0) {
    const absl::Status back = GoBack(options.run_id, first - 1);
    if (!absl::IsPermissionDenied(back)) return back.ok() ? absl::StatusOr<bool>(true) : back;
    Log(absl::StrCat("this client may not take it back (", back.message(),
                     "): an administrator can, with `ballastctl restore` or `ballastctl rewind`, and all daemons' "
                     "addresses; waiting for that"));
  }
  for (const auto& daemon : daemons_) daemon->Detach();
  if (auto s = AwaitAligned(options); !s.ok()) return s;
  return true;
}

// The step that some parts have just closed behind the others.
bool PartsClient::GoBackIfTorn(const Attachment& whole, const std::vector<Attachment>& attachments) {
  if (!whole.last_result || whole.last_result->step() + 1 != whole.resume_step) return false;
  return GoBackIfTorn(*whole.last_result, LastResults(attachments));
}

absl::StatusOr<std::vector<std::set<uint64_t>>> PartsClient::StepsKept(const std::string& run_id,
                                                                       std::vector<v1::RunStatus>* statuses) {
  std::vector<std::set<uint64_t>> kept(parts());
  for (uint32_t part = 0; part < parts(); ++part) {
    auto run = daemons_[part]->GetRun(run_id);
    if (!run.ok()) return NamedBy(names_[part], run.status());
    const v1::RunStatus& status = run->status();
    kept[part].insert(status.snapshot_steps().begin(), status.snapshot_steps().end());
    if (status.step() > 0) kept[part].insert(status.step());
    if (status.has_durability()) {
      auto stored = CheckpointsOf(part, run_id);
      if (!stored.ok()) return stored.status();
      kept[part].merge(*stored);
    }
    statuses->push_back(std::move(*run->mutable_status()));
  }
  return kept;
}

// To the last step, of those up to `at_most`, whose state all daemons have.
absl::Status PartsClient::GoBack(const std::string& run_id, uint64_t at_most) {
  absl::Status back;
  for (int i = 0; i < kMostLooks; ++i) {
    std::vector<v1::RunStatus> statuses;
    const auto kept = StepsKept(run_id, &statuses);
    if (!kept.ok()) return kept.status();
    const std::optional<uint64_t> target = LastCommonStep(*kept, at_most);
    if (!target) return NoCommonStep(run_id, *kept);
    back = TakeBack(run_id, *target, statuses);
    if (!absl::IsFailedPrecondition(back)) break;
  }
  return back;
}

absl::Status PartsClient::TakeBack(const std::string& run_id, uint64_t step,
                                   const std::vector<v1::RunStatus>& statuses) {
  for (uint32_t part = 0; part < parts(); ++part) {
    const auto& snapshots = statuses[part].snapshot_steps();
    if (statuses[part].step() == step) continue;
    if (std::find(snapshots.begin(), snapshots.end(), step) != snapshots.end()) {
      v1::RewindRequest request;
      request.set_run_id(run_id);
      request.set_to_step(step);
      request.set_reason("trainer");
      if (auto s = daemons_[part]->Rewind(request).status(); !s.ok()) return NamedBy(names_[part], s);
    } else if (auto s = daemons_[part]->Restore(run_id, step, /*from=*/"").status(); !s.ok()) {
      return NamedBy(names_[part], s);
    }
  }
  Log(absl::StrCat("run '", run_id, "' was taken back to step ", step, " on all of its daemons"));
  return absl::OkStatus();
}

absl::Status PartsClient::NoCommonStep(const std::string& run_id, const std::vector<std::set<uint64_t>>& kept) const {
  std::vector<std::string> lines;
  for (uint32_t part = 0; part < parts(); ++part) {
    lines.push_back(absl::StrCat(names_[part], " has ", kept[part].empty() ? "none" : absl::StrJoin(kept[part], ", ")));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the daemons of run '", run_id, "' are at different steps, and there is none whose state all have (",
                   absl::StrJoin(lines, "; "),
                   "): restore it from checkpoints of one step (ballastctl restore), or delete it and begin with "
                   "weights that you have"));
}

absl::Status PartsClient::AwaitAligned(const AttachOptions& options) {
  const absl::Time give_up = SteadyNow() + absl::Seconds(options.join_timeout_s);
  for (;;) {
    const auto runs = AskRuns(options.run_id);
    if (!runs.ok()) return runs.status();
    std::set<uint64_t> steps;
    for (const v1::GetRunResponse& run : *runs) steps.insert(run.status().step());
    if (*steps.rbegin() - *steps.begin() <= 1) return absl::OkStatus();
    if (SteadyNow() > give_up) {
      return absl::UnavailableError(absl::StrCat(
          "the daemons of run '", options.run_id, "' are at steps ", absl::StrJoin(steps, ", "), ", and for ",
          options.join_timeout_s, " s nobody has taken it back to a step that all have: rank 0 does when it attaches"));
    }
    if (options_.interrupted && options_.interrupted()) {
      return absl::CancelledError("interrupted while the run's daemons were at different steps");
    }
    absl::SleepFor(kLookEvery);
  }
}

}  // namespace ballast
