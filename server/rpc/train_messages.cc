#include "server/rpc/train_messages.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/batch.h"
#include "proto/checksum.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

message::Bad Refuse(Run* run, absl::string_view reason, absl::Status status) {
  run->metrics().OnRejectedChunk(std::string(reason));
  return message::Bad{std::move(status)};
}

// The gradient, if its data has the checksum that it says. One in a device's memory has none.
RankMessage IfIntact(Run* run, message::Gradient gradient) {
  if (gradient.data.on_device()) {
    gradient.crc = 0;
    return gradient;
  }
  const uint32_t crc = Crc32c(gradient.data.bytes());
  if (crc == gradient.crc) return RankMessage(std::move(gradient));
  return Refuse(
      run, "checksum",
      absl::DataLossError(absl::StrCat("chunk ", gradient.chunk, " of tensor ", gradient.tensor, " '",
                                       run->spec().tensors[gradient.tensor].name, "': crc32c of the data is ", crc,
                                       ", the message says ", gradient.crc, "; nothing of it was used")));
}

RankMessage ToGradient(Run* run, const v1::Gradient& gradient, Payload payload) {
  absl::string_view reason;
  if (absl::Status s = CheckGradient(gradient, payload.size(), run->spec(), &reason); !s.ok()) {
    return Refuse(run, reason, std::move(s));
  }
  return IfIntact(run, {.micro = gradient.micro(),
                        .tensor = gradient.tensor(),
                        .chunk = gradient.chunk(),
                        .crc = gradient.crc32c(),
                        .data = std::move(payload)});
}

void AddSmallGradients(Run* run, const v1::SmallGradients& gradients, std::vector<RankMessage>* messages) {
  if (absl::Status s = CheckSmallGradients(gradients); !s.ok()) {
    return messages->push_back(Refuse(run, "malformed", std::move(s)));
  }
  uint64_t at = 0;
  for (int i = 0; i < gradients.tensors_size(); ++i) {
    absl::string_view reason;
    const uint64_t size = gradients.sizes(i);
    if (absl::Status s = CheckSmallGradient(gradients.tensors(i), size, run->spec(), &reason); !s.ok()) {
      return messages->push_back(Refuse(run, reason, std::move(s)));
    }
    messages->push_back(IfIntact(run, {.micro = gradients.micro(),
                                       .tensor = gradients.tensors(i),
                                       .crc = gradients.crc32c(i),
                                       .data = Payload(gradients.data().substr(at, size))}));
    if (std::holds_alternative<message::Bad>(messages->back())) return;
    at += size;
  }
}

RankMessage ToRankMessage(Run* run, v1::TrainRequest* request, Payload payload) {
  const RunSpec& spec = run->spec();
  const auto or_bad = [](auto converted) -> RankMessage {
    if (converted.ok()) return *std::move(converted);
    return message::Bad{converted.status()};
  };
  if (request->has_gradient()) {
    if (request->gradient().has_nccl() && !payload.on_device()) {
      return message::Bad{absl::InvalidArgumentError(
          "a gradient's payload is said to come by NCCL, in a batch, or on a stream whose Opened has no slots")};
    }
    if (payload.size() == 0) payload = Payload(std::move(*request->mutable_gradient()->mutable_data()));
    return ToGradient(run, request->gradient(), std::move(payload));
  }
  if (request->has_step_begin()) return or_bad(ToStepBegin(request->step_begin(), spec));
  if (request->has_micro_end()) return or_bad(ToMicroEnd(request->micro_end(), spec));
  if (request->has_step_measure()) return message::StepMeasure{};
  if (request->has_step_end()) return or_bad(ToStepEnd(request->mutable_step_end(), spec));
  if (request->has_micro_begin()) {
    return message::MicroBegin{request->micro_begin().micro(), request->micro_begin().last()};
  }
  if (request->has_open()) return message::Bad{absl::FailedPreconditionError("Open came twice on one stream")};
  if (request->has_batch())
    return message::Bad{absl::InvalidArgumentError("a batch in a batch, or on the transport shm")};
  return message::Bad{absl::InvalidArgumentError("an empty message, or one of a later protocol")};
}

}  // namespace

absl::Status NoOpenCame(const RpcEnvironment& environment) {
  return absl::InvalidArgumentError(absl::StrCat("no Open came within ", environment.open_timeout_s,
                                                 " s of the stream's start (limits.open_timeout); send it first, with "
                                                 "the token of Attach"));
}

absl::StatusOr<TrainBinding> BindTrain(const RpcEnvironment& environment, const v1::TrainRequest& first) {
  if (!first.has_open()) {
    return absl::FailedPreconditionError("the first message of a Train stream must be Open, with the token of Attach");
  }
  const auto session = environment.sessions->Find(first.open().session_token());
  if (!session) return absl::NotFoundError("no session has this token; Attach first");
  TrainBinding binding;
  ASSIGN_OR_RETURN(binding.run, environment.runs->Find(session->run_id));
  binding.opened.session = session->id;
  binding.opened.weights_step = first.open().weights_step();
  ASSIGN_OR_RETURN(
      binding.opened.weights_received,
      ToBits(first.open().weights_received(), binding.run->spec().tensors.size(), "Open.weights_received"));
  return binding;
}

void AddRankMessages(Run* run, v1::TrainRequest* request, Payload payload, std::vector<RankMessage>* messages) {
  if (request->has_small_gradients()) return AddSmallGradients(run, request->small_gradients(), messages);
  messages->push_back(ToRankMessage(run, request, std::move(payload)));
}

bool AreSmall(const v1::Weights& weights) {
  return weights.chunk() == 0 && weights.last() && weights.scales_size() == 0 && !weights.has_nccl() &&
         weights.data().size() <= kMostJoinedBytes;
}

bool AddSmallWeights(const v1::Weights& weights, v1::SmallWeights* small) {
  const size_t bytes = weights.data().size();
  const bool fits = small->data().size() + bytes <= kMostJoinedBytes && small->tensors_size() < kMostBatchMessages;
  if (small->tensors_size() > 0 && (!fits || small->step() != weights.step())) return false;
  small->set_step(weights.step());
  small->add_tensors(weights.tensor());
  small->add_sizes(static_cast<uint32_t>(bytes));
  small->add_crc32c(weights.crc32c());
  small->mutable_data()->append(weights.data());
  return true;
}

v1::TrainResponse FromOutput(const StreamOutput& output, const RunSpec& spec) {
  v1::TrainResponse response;
  if (std::holds_alternative<output::Opened>(output)) response.mutable_opened()->set_takes_small_gradients(true);
  if (const auto* credit = std::get_if<output::Credit>(&output)) *response.mutable_credit() = FromCredit(*credit);
  if (const auto* measured = std::get_if<output::Measured>(&output)) {
    *response.mutable_step_measured() = FromMeasured(*measured);
  }
  if (const auto* drain = std::get_if<output::Drain>(&output)) response.mutable_drain()->set_reason(drain->reason);
  if (const auto* closed = std::get_if<StepRecord>(&output)) {
    *response.mutable_step_result() = FromResult(*closed, spec);
  }
  return response;
}

}  // namespace ballast
