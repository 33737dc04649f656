#include "server/convert/canonical_spec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/text_format.h>

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/spec/kernel_choice.h"
#include "server/spec/run_spec.h"
#include "server/stability/spikes.h"
#include "server/stability/tensor_clip.h"

namespace ballast {
namespace {

namespace pb = google::protobuf;

// A spec that is not valid is left as it is.
void FillGroup(v1::GroupSpec* group) {
  if (group->rounding().empty()) group->set_rounding("stochastic");
  const auto kernel = ChooseKernel(group->rule(), group->master(), group->state(), "");
  if (!kernel.ok()) return;
  group->set_master((*kernel)->master);
  group->set_state((*kernel)->state);
  if (group->has_lr_peak()) (*group->mutable_hyper())["lr_peak"] = group->lr_peak();
  group->clear_lr_peak();
  for (const kernels::Hyper& h : (*kernel)->hypers) group->mutable_hyper()->insert({h.name, h.value});
}

// The default threshold of RMS_t is not filled in: it may be out of the run's reach, which a threshold that was asked
// for may not be.
void FillSpikes(v1::SpikeSpec* spikes) {
  const SpikeSettings defaults;
  // Younger than checkpoints that are on disks, whose specs are known by their hash: a default is left out.
  if (spikes->rms_margin() == defaults.rms_margin) spikes->clear_rms_margin();
  if (spikes->rms_min_elements() == defaults.rms_min_elements) spikes->clear_rms_min_elements();
  if (!spikes->has_warmup_steps()) spikes->set_warmup_steps(defaults.warmup_steps);
  if (!spikes->has_loss_sigmas()) spikes->set_loss_sigmas(defaults.loss_sigmas);
  if (!spikes->has_norm_sigmas()) spikes->set_norm_sigmas(defaults.norm_sigmas);
  if (!spikes->has_rewind_steps()) spikes->set_rewind_steps(defaults.rewind_steps);
  if (!spikes->has_max_rewinds()) spikes->set_max_rewinds(defaults.most_rewinds);
  if (!spikes->has_max_skips()) spikes->set_max_skips(defaults.most_skips);
  if (!spikes->has_cooldown_steps()) spikes->set_cooldown_steps(defaults.cooldown_steps);
  if (spikes->action() == v1::SPIKE_ACTION_UNSPECIFIED) spikes->set_action(v1::SPIKE_ACTION_WARN);
}

void FillTensorClip(v1::TensorClipSpec* clip) {
  const TensorClip::Options defaults;
  if (!clip->has_absolute()) clip->set_absolute(defaults.absolute);
  if (!clip->has_relative()) clip->set_relative(defaults.relative);
  if (!clip->has_beta()) clip->set_beta(defaults.beta);
  if (!clip->has_warmup_steps()) clip->set_warmup_steps(static_cast<uint32_t>(defaults.warmup));
}

void FillCheckpoint(v1::CheckpointPolicy* policy) {
  const CheckpointSettings defaults;
  if (policy->every_steps() == 0 && policy->every_seconds() == 0) policy->set_every_seconds(defaults.every_s);
  if (policy->retain() == 0) policy->set_retain(defaults.retain);
  const bool journaled = policy->durability() != v1::DURABILITY_MODE_CHECKPOINT;
  if (journaled && policy->journal_steps() == 0) policy->set_journal_steps(kJournalSteps);
}

void FillFollow(v1::FollowSpec* follow) {
  const FollowSettings defaults;
  if (follow->every() == 0) follow->set_every(defaults.every);
  if (follow->readers() == 0) follow->set_readers(defaults.readers);
}

// Field by field through reflection, so that a field added to the spec is compared without an edit here.
class Comparison {
 public:
  std::optional<std::string> Messages(const pb::Message& a, const pb::Message& b, const std::string& path) {
    const pb::Descriptor* descriptor = a.GetDescriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const pb::FieldDescriptor* field = descriptor->field(i);
      const std::string here = absl::StrCat(path, path.empty() ? "" : ".", field->name());
      auto difference = field->is_map()        ? Maps(a, b, field, here)
                        : field->is_repeated() ? Lists(a, b, field, here)
                                               : Values(a, b, field, here, -1);
      if (difference) return difference;
    }
    return std::nullopt;
  }

 private:
  static std::string Print(const pb::Message& m, const pb::FieldDescriptor* field, int index) {
    std::string text;
    pb::TextFormat::PrintFieldValueToString(m, field, index, &text);
    return text;
  }
  static std::string Say(const std::string& path, const std::string& existing, const std::string& asked) {
    return absl::StrCat(path, " is ", existing, ", asked for is ", asked);
  }

  std::optional<std::string> Values(const pb::Message& a, const pb::Message& b, const pb::FieldDescriptor* field,
                                    const std::string& path, int index) {
    if (index < 0 && field->has_presence()) {
      const bool has_a = a.GetReflection()->HasField(a, field), has_b = b.GetReflection()->HasField(b, field);
      if (!has_a && !has_b) return std::nullopt;
      if (!has_a) return Say(path, "unset", Print(b, field, index));
      if (!has_b) return Say(path, Print(a, field, index), "unset");
    }
    if (index < 0 && field->message_type() != nullptr) {
      return Messages(a.GetReflection()->GetMessage(a, field), b.GetReflection()->GetMessage(b, field), path);
    }
    const std::string x = Print(a, field, index), y = Print(b, field, index);
    if (x == y) return std::nullopt;
    return Say(path, x, y);
  }

  std::optional<std::string> Lists(const pb::Message& a, const pb::Message& b, const pb::FieldDescriptor* field,
                                   const std::string& path) {
    const int size_a = a.GetReflection()->FieldSize(a, field), size_b = b.GetReflection()->FieldSize(b, field);
    for (int i = 0; i < std::min(size_a, size_b); ++i) {
      const std::string here = absl::StrCat(path, "[", i, "]");
      auto difference = field->message_type() != nullptr
                            ? Messages(a.GetReflection()->GetRepeatedMessage(a, field, i),
                                       b.GetReflection()->GetRepeatedMessage(b, field, i), here)
                            : Values(a, b, field, here, i);
      if (difference) return difference;
    }
    if (size_a == size_b) return std::nullopt;
    return Say(path, absl::StrCat(size_a, " long"), absl::StrCat(size_b, " long"));
  }

  // Compares maps of strings to doubles, the only kind in the spec.
  std::optional<std::string> Maps(const pb::Message& a, const pb::Message& b, const pb::FieldDescriptor* field,
                                  const std::string& path) {
    const auto entries = [&](const pb::Message& m) {
      std::map<std::string, std::string> printed;
      const pb::FieldDescriptor *key = field->message_type()->map_key(), *value = field->message_type()->map_value();
      for (int i = 0; i < m.GetReflection()->FieldSize(m, field); ++i) {
        const pb::Message& entry = m.GetReflection()->GetRepeatedMessage(m, field, i);
        printed[Print(entry, key, -1)] = Print(entry, value, -1);
      }
      return printed;
    };
    const auto x = entries(a), y = entries(b);
    for (const auto& [key, value] : x) {
      const auto other = y.find(key);
      const std::string there = other == y.end() ? "unset" : other->second;
      if (there != value) return Say(absl::StrCat(path, "[", key, "]"), value, there);
    }
    for (const auto& [key, value] : y) {
      if (x.find(key) == x.end()) return Say(absl::StrCat(path, "[", key, "]"), "unset", value);
    }
    return std::nullopt;
  }
};

}  // namespace

v1::RunSpec Canonical(const v1::RunSpec& spec, bool has_storage) {
  v1::RunSpec canonical = spec;
  canonical.DiscardUnknownFields();
  for (v1::TensorSpec& t : *canonical.mutable_tensors()) {
    if (!t.has_lr_scale()) t.set_lr_scale(1);
    if (!t.has_wd_scale()) t.set_wd_scale(1);
  }
  for (v1::GroupSpec& group : *canonical.mutable_groups()) FillGroup(&group);
  if (canonical.commit() == v1::COMMIT_MODE_UNSPECIFIED) canonical.set_commit(v1::COMMIT_MODE_RELEASE);
  if (canonical.reduction() == v1::REDUCTION_UNSPECIFIED) canonical.set_reduction(v1::REDUCTION_MEAN);
  if (canonical.accumulation() == 0) canonical.set_accumulation(1);
  if (canonical.ranks() == 0) canonical.set_ranks(1);
  if (canonical.nonfinite() == v1::NONFINITE_POLICY_UNSPECIFIED) {
    canonical.set_nonfinite(canonical.dynamic_loss_scale() ? v1::NONFINITE_POLICY_SKIP_STEP
                                                           : v1::NONFINITE_POLICY_SKIP_TENSOR);
  }
  if (canonical.on_torn() == v1::TORN_POLICY_UNSPECIFIED) canonical.set_on_torn(v1::TORN_POLICY_CLOSE);
  if (canonical.on_lost_rank() == v1::LOST_RANK_POLICY_UNSPECIFIED) {
    canonical.set_on_lost_rank(v1::LOST_RANK_POLICY_WAIT);
  }
  if (canonical.stats_every() == 0) canonical.set_stats_every(10);
  if (canonical.rewind().snapshots() == 0) {
    canonical.clear_rewind();
  } else if (canonical.rewind().every() == 0) {
    canonical.mutable_rewind()->set_every(50);
  }
  if (canonical.rank_timeout_s() == 0) canonical.set_rank_timeout_s(60);
  FillSpikes(canonical.mutable_spikes());
  if (canonical.has_tensor_clip()) FillTensorClip(canonical.mutable_tensor_clip());
  if (has_storage) FillCheckpoint(canonical.mutable_checkpoint());
  if (canonical.has_follow()) FillFollow(canonical.mutable_follow());
  return canonical;
}

std::string SerializeCanonical(const v1::RunSpec& canonical) {
  std::string bytes;
  pb::io::StringOutputStream stream(&bytes);
  pb::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  canonical.SerializeToCodedStream(&coded);
  coded.Trim();
  return bytes;
}

std::optional<std::string> FirstDifference(const v1::RunSpec& existing, const v1::RunSpec& asked) {
  // A part and a whole run differ in their tensors, too, which tells nobody why.
  if (existing.has_part() != asked.has_part()) {
    const v1::RunPart& part = existing.has_part() ? existing.part() : asked.part();
    const std::string said = absl::StrCat(part.index(), " of ", part.count());
    return existing.has_part() ? absl::StrCat("part is ", said, ", asked for is the whole run")
                               : absl::StrCat("part is the whole run, asked for is ", said);
  }
  return Comparison().Messages(existing, asked, "");
}

}  // namespace ballast
