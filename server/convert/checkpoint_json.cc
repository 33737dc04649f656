#include "server/convert/checkpoint_json.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/manifest.h"
#include "proto/tls/sha256.h"

#include "server/base/status_macros.h"
#include "server/convert/canonical_spec.h"
#include "server/convert/convert.h"
#include "server/storage/damage.h"

namespace ballast {
namespace {

absl::Status Wrong(const std::string& file, absl::string_view field, const std::string& how) {
  return absl::DataLossError(absl::StrCat(file, " is damaged, or of another run: ", field, " ", how));
}

absl::Status CheckCount(const std::string& file, absl::string_view field, int has, size_t wanted, bool may_be_empty) {
  const auto count = static_cast<size_t>(has);
  if (count == wanted || (may_be_empty && count == 0)) return absl::OkStatus();
  return Wrong(file, field, absl::StrCat("has ", count, " entries; wanted are ", wanted));
}

// --- the spike detector ---------------------------------------------------------------------------------------------

v1::WindowState FromWindow(const RunningWindow& window) {
  v1::WindowState out;
  for (const double value : window.values()) out.add_values(value);
  out.set_next(static_cast<uint32_t>(window.next()));
  return out;
}

absl::StatusOr<RunningWindow> ToWindow(const v1::WindowState& window, absl::string_view field,
                                       const std::string& file) {
  const auto count = static_cast<size_t>(window.values_size());
  const size_t next = window.next();
  // Until it is full, the next one is stored behind the last.
  if (count > RunningWindow::kSize || next >= RunningWindow::kSize || (count < RunningWindow::kSize && next != count)) {
    return Wrong(file, field, absl::StrCat("has ", count, " values, the next one to be stored at ", next));
  }
  if (!std::all_of(window.values().begin(), window.values().end(), [](double v) { return std::isfinite(v); })) {
    return Wrong(file, field, "has a value that is not finite");
  }
  return RunningWindow({window.values().data(), count}, next);
}

void AddWatches(const std::vector<SpikeDetector::Watch>& watches,
                google::protobuf::RepeatedPtrField<v1::WatchState>* out) {
  for (const SpikeDetector::Watch& watch : watches) {
    v1::WatchState* const state = out->Add();
    state->set_high(watch.high);
    state->set_last_event(watch.last_event);
    for (const double value : watch.recent.blocks()) state->add_recent(value);
    state->set_in_last(static_cast<uint32_t>(watch.recent.in_last()));
  }
}

absl::StatusOr<std::vector<SpikeDetector::Watch>> ToWatches(
    const google::protobuf::RepeatedPtrField<v1::WatchState>& watches, const std::string& file) {
  std::vector<SpikeDetector::Watch> out;
  for (const v1::WatchState& watch : watches) {
    const auto blocks = static_cast<size_t>(watch.recent_size());
    const bool fits = blocks <= RunningMax::kBlocks + 1 && watch.in_last() <= RunningMax::kBlock;
    if (!fits || (blocks == 0) != (watch.in_last() == 0)) {
      return Wrong(file, "detector.rms.recent",
                   absl::StrCat("has ", blocks, " blocks, and ", watch.in_last(), " steps in the last one"));
    }
    out.push_back({.high = watch.high(),
                   .last_event = watch.last_event(),
                   .recent = RunningMax({watch.recent().begin(), watch.recent().end()}, watch.in_last())});
  }
  return out;
}

void AddLossSpike(const LossWatch::State& loss, v1::DetectorState* out) {
  *out->mutable_losses() = FromWindow(loss.losses);
  if (loss.since == 0) return;
  v1::LossSpikeState* const spike = out->mutable_loss_spike();
  spike->set_since(loss.since);
  spike->set_first_loss(loss.first_loss);
  spike->set_median(loss.before.median);
  spike->set_spread(loss.before.spread);
  spike->set_huge(loss.before.huge);
  spike->set_wanted(loss.before.wanted);
  spike->set_looks(loss.looks);
  spike->set_high(loss.high);
  spike->set_calm(loss.calm);
  spike->set_spike(loss.spike);
}

absl::StatusOr<LossWatch::State> ToLossWatch(const v1::DetectorState& detector, const std::string& file) {
  const v1::LossSpikeState& spike = detector.loss_spike();
  ASSIGN_OR_RETURN(RunningWindow losses, ToWindow(detector.losses(), "detector.losses", file));
  LossWatch::Usual before{.median = spike.median(), .spread = spike.spread()};
  const bool earlier = spike.wanted() == 0;
  before.huge = earlier ? std::numeric_limits<double>::max() : spike.huge();
  if (!earlier) before.wanted = spike.wanted();
  return LossWatch::State{.losses = std::move(losses),
                          .since = spike.since(),
                          .first_loss = spike.first_loss(),
                          .before = before,
                          .looks = spike.looks(),
                          .high = spike.high(),
                          .calm = spike.calm(),
                          .spike = spike.spike()};
}

v1::ScoreState FromScore(const SpikeScore& score) {
  v1::ScoreState out;
  for (const SpikeScore::Past& past : score.past()) out.add_past((past.event ? 1 : 0) + (past.settled ? 2 : 0));
  const SpikeScore::Counts& counts = score.counts();
  out.set_hits(counts.hits);
  out.set_misses(counts.misses);
  out.set_false_alarms(counts.false_alarms);
  out.set_steps(counts.steps);
  out.set_covered(counts.covered);
  for (const uint64_t lead : counts.leads) out.add_leads(lead);
  return out;
}

absl::StatusOr<SpikeScore> ToScore(const v1::ScoreState& score, const std::string& file) {
  SpikeScore::PastSteps past = {};
  SpikeScore::Counts counts{.hits = score.hits(),
                            .misses = score.misses(),
                            .false_alarms = score.false_alarms(),
                            .steps = score.steps(),
                            .covered = score.covered()};
  // Of an earlier version it looks back less far.
  if (static_cast<size_t>(score.past_size()) > past.size()) {
    return CheckCount(file, "detector.scores.past", score.past_size(), past.size(), false);
  }
  RETURN_IF_ERROR(CheckCount(file, "detector.scores.leads", score.leads_size(), counts.leads.size(), false));
  for (size_t i = 0; i < static_cast<size_t>(score.past_size()); ++i) {
    const uint32_t was = score.past(static_cast<int>(i));
    past[i] = {.event = (was & 1) != 0, .settled = (was & 2) != 0};
  }
  std::copy(score.leads().begin(), score.leads().end(), counts.leads.begin());
  return SpikeScore(past, counts);
}

v1::DetectorState FromDetector(const SpikeDetector& detector) {
  const SpikeDetector::State state = detector.state();
  v1::DetectorState out;
  AddWatches(state.rms, out.mutable_rms());
  AddWatches(state.curvature, out.mutable_curvature());
  AddLossSpike(state.loss, &out);
  *out.mutable_norms() = FromWindow(state.norms);
  for (const SpikeScore& score : state.scores) *out.add_scores() = FromScore(score);
  return out;
}

absl::StatusOr<SpikeDetector> ToDetector(const v1::DetectorState& detector, const RunSpec& spec,
                                         const std::string& file) {
  const size_t layers = spec.layers.size();
  SpikeDetector::State state;
  RETURN_IF_ERROR(CheckCount(file, "detector.rms", detector.rms_size(), layers, false));
  RETURN_IF_ERROR(CheckCount(file, "detector.curvature", detector.curvature_size(), layers, false));
  RETURN_IF_ERROR(CheckCount(file, "detector.scores", detector.scores_size(), kPredictors, false));
  ASSIGN_OR_RETURN(state.rms, ToWatches(detector.rms(), file));
  ASSIGN_OR_RETURN(state.curvature, ToWatches(detector.curvature(), file));
  ASSIGN_OR_RETURN(state.loss, ToLossWatch(detector, file));
  ASSIGN_OR_RETURN(state.norms, ToWindow(detector.norms(), "detector.norms", file));
  for (size_t i = 0; i < kPredictors; ++i) {
    ASSIGN_OR_RETURN(state.scores[i], ToScore(detector.scores(static_cast<int>(i)), file));
  }
  // Thresholds come with the spec; only what was learned is gone on from.
  SpikeDetector made(spec.spikes, std::vector<double>(layers));
  made.GoOnFrom(std::move(state));
  return made;
}

// --- the last step --------------------------------------------------------------------------------------------------

std::optional<uint32_t> LayerNamed(const RunSpec& spec, const std::string& name) {
  for (uint32_t l = 0; l < spec.layers.size(); ++l) {
    if (!name.empty() && spec.layers[l].name == name) return l;
  }
  return std::nullopt;
}

std::optional<uint32_t> TensorNamed(const RunSpec& spec, const std::string& name) {
  for (uint32_t t = 0; t < spec.tensors.size(); ++t) {
    if (!name.empty() && spec.tensors[t].name == name) return t;
  }
  return std::nullopt;
}

absl::StatusOr<SpikeEvent> ToSpike(const v1::SpikeEvent& event, const RunSpec& spec, const std::string& file) {
  const int kind = static_cast<int>(event.kind()) - 1;
  if (kind < 0 || kind >= static_cast<int>(kSpikeKinds)) return Wrong(file, "result.spikes.kind", "is unknown");
  return SpikeEvent{.kind = static_cast<SpikeKind>(kind),
                    .layer = LayerNamed(spec, event.layer()),
                    .tensor = TensorNamed(spec, event.tensor()),
                    .value = event.value(),
                    .threshold = event.threshold(),
                    .since = event.since_step()};
}

absl::StatusOr<Outcome> ToOutcome(v1::StepOutcome outcome, const std::string& file) {
  for (const Outcome one : {Outcome::kApplied, Outcome::kSkipped, Outcome::kAborted, Outcome::kPartial}) {
    if (FromOutcome(one) == outcome) return one;
  }
  return Wrong(file, "result.outcome", "is unknown");
}

StepRecord ToRecord(const v1::StepRecord& record) {
  StepRecord out{.closed_at_s = record.closed_at_s(),
                 .seconds = record.seconds(),
                 .receive_seconds = record.receive_seconds(),
                 .update_seconds = record.update_seconds(),
                 .wait_seconds = record.wait_seconds(),
                 .last_rank = record.last_rank(),
                 .received_bytes = record.received_bytes(),
                 .sent_bytes = record.sent_bytes(),
                 .learning_rate = record.learning_rate()};
  if (record.has_loss()) out.loss = record.loss();
  if (record.has_edq_ratio()) out.edq_ratio = record.edq_ratio();
  if (record.has_unchanged_ratio()) out.unchanged_ratio = record.unchanged_ratio();
  if (record.has_curvature_ratio()) out.curvature_ratio = record.curvature_ratio();
  out.layer_rms.assign(record.layer_rms().begin(), record.layer_rms().end());
  return out;
}

absl::StatusOr<StepRecord> ToResult(const v1::CheckpointedRun& run, const RunSpec& spec, const std::string& file) {
  const v1::StepResult& result = run.result();
  StepRecord out = ToRecord(run.record());
  out.step = result.step();
  if (out.step != run.step() || out.step == 0) {
    return Wrong(file, "result.step", absl::StrCat("is ", out.step, ", and step ", run.step()));
  }
  ASSIGN_OR_RETURN(out.outcome, ToOutcome(result.outcome(), file));
  out.reason = result.reason();
  out.detail = result.detail();
  out.not_applied.assign(result.tensors_not_applied().begin(), result.tensors_not_applied().end());
  out.left_out.assign(result.ranks_left_out().begin(), result.ranks_left_out().end());
  out.durable_step = result.durable_step();
  out.grad_norm = result.grad_norm();
  out.clip_coefficient = result.clip_coefficient();
  out.nonfinite_tensors = result.nonfinite_tensors();
  out.rejected_blocks = result.rejected_blocks();
  for (const v1::SpikeEvent& event : result.spikes()) {
    ASSIGN_OR_RETURN(SpikeEvent spike, ToSpike(event, spec, file));
    out.spikes.push_back(std::move(spike));
  }
  const auto past_last = [&](uint32_t tensor) { return tensor >= spec.tensors.size(); };
  if (std::any_of(out.not_applied.begin(), out.not_applied.end(), past_last)) {
    return Wrong(file, "result.tensors_not_applied", "names a tensor that the run does not have");
  }
  return out;
}

// --- what belongs to tensors and ranks ------------------------------------------------------------------------------

absl::Status TakeTensors(const v1::CheckpointedRun& run, const RunSpec& spec, const std::string& file,
                         CheckpointedRun* made) {
  const size_t tensors = spec.tensors.size();
  RETURN_IF_ERROR(CheckCount(file, "updates", run.updates_size(), tensors, false));
  RETURN_IF_ERROR(CheckCount(file, "updated_in", run.updated_in_size(), tensors, false));
  RETURN_IF_ERROR(CheckCount(file, "averaged", run.averaged_size(), spec.averages.empty() ? 0 : tensors, false));
  RETURN_IF_ERROR(CheckCount(file, "last_lr", run.last_lr_size(), tensors, true));
  RETURN_IF_ERROR(CheckCount(file, "norms", run.norms_size(), spec.tensor_clip ? tensors : 0, false));
  for (int t = 0; t < run.updates_size(); ++t) {
    const bool averaged = t < run.averaged_size() && run.averaged(t);
    made->counts.push_back({.updates = run.updates(t), .step = run.updated_in(t), .averaged = averaged});
    if (run.updated_in(t) > run.step()) return Wrong(file, "updated_in", "names a step after the last");
  }
  made->memory.last_lr.assign(run.last_lr().begin(), run.last_lr().end());
  for (const v1::TensorNorm& norm : run.norms()) {
    made->memory.norms.push_back({.norm = norm.average(), .steps = norm.steps()});
  }
  return absl::OkStatus();
}

absl::Status TakeClientStates(const v1::CheckpointedRun& run, const RunSpec& spec, const std::string& file,
                              RunMemory* memory) {
  RETURN_IF_ERROR(CheckCount(file, "client_state_steps", run.client_state_steps_size(), spec.ranks, false));
  RETURN_IF_ERROR(CheckCount(file, "client_state_bytes", run.client_state_bytes_size(), spec.ranks, false));
  for (int rank = 0; rank < run.client_state_steps_size(); ++rank) {
    const uint64_t step = run.client_state_steps(rank), bytes = run.client_state_bytes(rank);
    if (bytes > kMostClientState)
      return Wrong(file, "client_state_bytes", absl::StrCat("has one of ", bytes, " bytes"));
    if (step > run.step()) return Wrong(file, "client_state_steps", "names a step after the last");
    if (step == 0 && bytes > 0) return Wrong(file, "client_state_bytes", "has one of no step");
    memory->client_states.push_back(step == 0 ? std::nullopt
                                              : std::optional(ClientState{step, std::string(bytes, '\0')}));
  }
  return absl::OkStatus();
}

std::string SpecJson(const std::string& canonical) {
  v1::RunSpec spec;
  spec.ParseFromString(canonical);  // made by SerializeCanonical
  return ToJson(spec);
}

}  // namespace

v1::CheckpointedRun FromCheckpointed(const RunSpec& spec, const RunFigures& figures, const RunMemory& memory,
                                     const std::vector<ParameterStore::UpdateCount>& counts) {
  v1::CheckpointedRun out;
  out.set_step(memory.result.step);
  out.set_generation(figures.generation);
  for (const ParameterStore::UpdateCount& count : counts) {
    out.add_updates(count.updates);
    out.add_updated_in(count.step);
    if (!spec.averages.empty()) out.add_averaged(count.averaged);
  }
  out.mutable_last_lr()->Assign(memory.last_lr.begin(), memory.last_lr.end());
  for (const TensorClip::Average& norm : memory.norms) {
    v1::TensorNorm* const average = out.add_norms();
    average->set_average(norm.norm);
    average->set_steps(norm.steps);
  }
  *out.mutable_result() = FromResult(memory.result, spec);
  out.mutable_result()->clear_checkpoint_step();  // of this disk, not of the run
  *out.mutable_record() = FromRecord(memory.result, spec);
  out.set_stopped(memory.stopped);
  for (const auto& state : memory.client_states) {
    out.add_client_state_steps(state ? state->step : 0);
    out.add_client_state_bytes(state ? state->bytes.size() : 0);
  }
  *out.mutable_detector() = FromDetector(memory.detector);
  const SpikePolicy::State policy = figures.policy.state();
  out.mutable_policy()->set_rest(policy.rest);
  out.mutable_policy()->set_skips(policy.skips);
  out.mutable_policy()->set_rewinds(policy.rewinds);
  out.mutable_counts()->set_applied(figures.applied);
  out.mutable_counts()->set_skipped(figures.skipped);
  out.mutable_counts()->set_partial(figures.partial);
  out.mutable_counts()->set_aborted(figures.aborted);
  out.set_rewinds(figures.rewinds);
  out.set_journal(figures.journal);
  if (figures.ranks_held) out.set_ranks_held(*figures.ranks_held);
  return out;
}

absl::StatusOr<CheckpointedRun> ToCheckpointed(const v1::CheckpointedRun& run, const RunSpec& spec,
                                               const std::string& file) {
  CheckpointedRun made{.figures = {.generation = run.generation(),
                                   .applied = run.counts().applied(),
                                   .skipped = run.counts().skipped(),
                                   .partial = run.counts().partial(),
                                   .aborted = run.counts().aborted(),
                                   .rewinds = run.rewinds(),
                                   .policy = SpikePolicy(spec.spikes),
                                   .journal = run.journal()}};
  if (run.has_ranks_held()) made.figures.ranks_held = run.ranks_held();
  made.figures.policy.GoOnFrom(
      {.rest = run.policy().rest(), .skips = run.policy().skips(), .rewinds = run.policy().rewinds()});
  ASSIGN_OR_RETURN(made.memory.result, ToResult(run, spec, file));
  ASSIGN_OR_RETURN(made.memory.detector, ToDetector(run.detector(), spec, file));
  made.memory.stopped = run.stopped();
  RETURN_IF_ERROR(TakeTensors(run, spec, file, &made));
  RETURN_IF_ERROR(TakeClientStates(run, spec, file, &made.memory));
  return made;
}

absl::StatusOr<v1::RunSpec> ReadSpecJson(absl::string_view json, const std::string& sha256, const std::string& file) {
  v1::RunSpec spec;
  RETURN_IF_ERROR(ReadJson(json, file, &spec));
  if (Sha256Hex(SerializeCanonical(spec)) == sha256) return spec;
  return absl::DataLossError(absl::StrCat(file, " is damaged: it is not the spec that the manifest has the hash of"));
}

const CheckpointCodec& JsonCheckpoints() {
  static const auto* const codec =
      new CheckpointCodec{.run_json =
                              [](const RunSpec& spec, const RunFigures& figures, const RunMemory& memory,
                                 const std::vector<ParameterStore::UpdateCount>& counts) {
                                return ToJson(FromCheckpointed(spec, figures, memory, counts));
                              },
                          .read_run = [](const RunSpec& spec, const std::string& json,
                                         const std::string& file) -> absl::StatusOr<CheckpointedRun> {
                            v1::CheckpointedRun run;
                            RETURN_IF_ERROR(ReadJson(json, file, &run));
                            return ToCheckpointed(run, spec, file);
                          },
                          .run_bytes =
                              [](const RunSpec& spec, const RunFigures& figures, const RunMemory& memory,
                                 const std::vector<ParameterStore::UpdateCount>& counts) {
                                return FromCheckpointed(spec, figures, memory, counts).SerializeAsString();
                              },
                          .read_run_bytes = [](const RunSpec& spec, const std::string& bytes,
                                               const std::string& file) -> absl::StatusOr<CheckpointedRun> {
                            v1::CheckpointedRun run;
                            if (!run.ParseFromString(bytes)) return Wrong(file, "CheckpointedRun", "cannot be read");
                            RETURN_IF_ERROR(CheckVersion(run, file));
                            return ToCheckpointed(run, spec, file);
                          },
                          .spec_json = SpecJson};
  return *codec;
}

}  // namespace ballast
