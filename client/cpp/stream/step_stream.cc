#include "client/cpp/stream/step_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/rewound.h"

#include "client/cpp/stream/goodbye.h"
#include "client/cpp/stream/ready.h"

namespace ballast {
namespace {

// How long the destructor waits for the daemon to answer the end of the stream, and before that for the step that was ended.
// A rank that leaves without that counts as lost, so a daemon that is only busy gets its time, and the step is over; where
// the connection is lost there is nobody to wait for.
constexpr absl::Duration kGoodbye = absl::Seconds(5), kGoodbyeWhileAway = absl::Milliseconds(700);

// `message` has groups: StepBegin or StepEnd.
template <typename Message>
void FillGroups(const std::vector<GroupValues>& groups, Message* message) {
  for (const GroupValues& group : groups) {
    v1::GroupStep* out = message->add_groups();
    if (group.lr) out->set_lr(*group.lr);
    if (group.weight_decay) out->set_weight_decay(*group.weight_decay);
    if (group.beta1) out->set_beta1(*group.beta1);
    if (group.beta2) out->set_beta2(*group.beta2);
    if (group.momentum) out->set_momentum(*group.momentum);
  }
}

v1::StepBegin MakeBegin(uint64_t step, const StepValues& values) {
  v1::StepBegin begin;
  begin.set_step(step);
  begin.set_loss_scale(values.loss_scale);
  FillGroups(values.groups, &begin);
  return begin;
}

v1::StepEnd MakeEnd(const StepEndValues& values) {
  v1::StepEnd end;
  end.set_client_state(values.client_state);
  FillGroups(values.groups, &end);
  if (values.max_grad_norm) end.set_max_grad_norm(*values.max_grad_norm);
  if (values.discard) end.set_discard(true);
  if (values.gradient_flushed) end.set_gradient_flushed(*values.gradient_flushed);
  if (values.gradient_overflowed) end.set_gradient_overflowed(*values.gradient_overflowed);
  if (values.whole) *end.mutable_whole() = *values.whole;
  end.set_checkpoint(values.checkpoint);
  end.set_kept_step(values.kept_step);
  return end;
}

}  // namespace

StepStream::StepStream(Connection& connection, AttachOptions options, TensorTable tensors, OpenTransport open_transport,
                       std::shared_ptr<Gpu> gpu)
    : connection_(connection),
      options_(std::move(options)),
      tensors_(std::move(tensors)),
      attached_at_(BootNow()),
      open_transport_(std::move(open_transport)),
      gpu_(std::move(gpu)),
      memory_(gpu_),
      bound_(tensors_.size()) {}

absl::StatusOr<std::unique_ptr<StepStream>> StepStream::Start(Connection& connection, AttachOptions options,
                                                              const v1::AttachResponse& grant, TensorTable tensors,
                                                              OpenTransport open_transport, std::shared_ptr<Gpu> gpu) {
  std::unique_ptr<StepStream> stream(
      new StepStream(connection, std::move(options), std::move(tensors), std::move(open_transport), std::move(gpu)));
  StepStream& self = *stream;
  self.reader_ = std::thread([&self, grant] { self.Read(grant); });
  self.writer_ = std::thread([&self] { self.Write(); });
  if (auto s = self.AwaitOpened(); !s.ok()) return s;
  return stream;
}

absl::Status StepStream::AwaitOpened() {
  const auto decided = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return opened_once_ || !status_.ok(); };
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&decided), Connection::kInterruptGlance)) return status_;
    }
    if (connection_.Interrupted()) return absl::CancelledError("interrupted while the stream was to be opened");
  }
}

void StepStream::End() {
  {
    absl::MutexLock lock(&mu_);
    if (!leaving_) was_open_ = open_;
    leaving_ = true;
    const bool comes_to_an_end = !step_ || (open_ && step_->ended());
    if (comes_to_an_end) mu_.AwaitWithTimeout(absl::Condition(&reader_done_), open_ ? kGoodbye : kGoodbyeWhileAway);
    in_step_ = in_step_ || step_;
  }
  Cancel();
  if (reader_.joinable()) reader_.join();
  if (writer_.joinable()) writer_.join();
  Fail(absl::CancelledError("the client was destroyed while the step was open"));
}

std::optional<absl::Duration> StepStream::GoodbyeOwed() const {
  absl::MutexLock lock(&mu_);
  const bool rewound = RewoundTo(status_).has_value();
  const bool unheard = absl::IsCancelled(status_) && !goodbye_heard_ && !in_step_;
  if (!rewound && !unheard) return std::nullopt;
  return rewound || was_open_ ? kGoodbye : kGoodbyeWhileAway;
}

void StepStream::Leave() {
  const uint64_t last = step() - 1;
  End();
  const auto owed = GoodbyeOwed();
  if (!owed) return;
  const auto step = GiveRankBack(connection_, options_, RewoundTo(status()) ? "" : token(), *owed);
  const std::string rank = absl::StrCat("rank ", options_.rank, " of run '", options_.run_id, "'");
  if (step.ok() && *step < last) {
    connection_.Log(absl::StrCat(rank, " was left at step ", *step, ", which the run went back to from step ", last));
  } else if (IsLost(step.status())) {
    connection_.Log(
        absl::StrCat("the daemon at ", connection_.server(), " could not be told that ", rank, " is left (",
                     ConnectionReason(std::string(step.status().message())),
                     "): it counts the rank as lost until a trainer takes it and leaves, or the run is deleted"));
  }
}

void StepStream::Cancel() {
  std::shared_ptr<Call> call;
  std::shared_ptr<grpc::ClientContext> asking;
  {
    absl::MutexLock lock(&mu_);
    call = call_;
    asking = asking_;
  }
  if (call) call->transport->Cancel();
  if (asking) asking->TryCancel();
}

std::string StepStream::token() const {
  absl::MutexLock lock(&mu_);
  return token_;
}

bool StepStream::shares_gpu() const {
  absl::MutexLock lock(&mu_);
  return call_ != nullptr && call_->transport->on_gpu();
}

uint64_t StepStream::step() const {
  absl::MutexLock lock(&mu_);
  return step_ ? step_number_ : std::max(step_number_, closed_elsewhere_ + 1);
}

absl::Status StepStream::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

bool StepStream::AwaitConnected(absl::Duration timeout) {
  const auto there = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return open_ || !status_.ok(); };
  absl::MutexLock lock(&mu_);
  if (call_ != nullptr && call_->transport->HungUp()) open_ = false;  // why, the reader finds out
  return mu_.AwaitWithTimeout(absl::Condition(&there), timeout);
}

void StepStream::AwaitEnd(absl::Duration timeout) const {
  absl::MutexLock lock(&mu_);
  const auto ended = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !status_.ok(); };
  mu_.AwaitWithTimeout(absl::Condition(&ended), timeout);
}

absl::Status StepStream::BindWeights(uint32_t tensor, void* destination, uint64_t bytes) {
  if (auto s = tensors_.CheckIndex(tensor); !s.ok()) return s;
  const WireTensor& wire = tensors_[tensor];
  if (destination != nullptr && bytes != wire.weight_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("BindWeights of ", tensors_.Name(tensor), ": got ", bytes,
                                                   " bytes, wanted ", wire.weight_bytes(), " (", wire.held_elements(),
                                                   " x ", wire.landing(), ")"));
  }
  return Bind(tensor, {.weights = static_cast<std::byte*>(destination), .as_served = wire.landing() == wire.serving});
}

absl::Status StepStream::BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) {
  if (auto s = tensors_.CheckIndex(tensor); !s.ok()) return s;
  const WireTensor& wire = tensors_[tensor];
  if (bytes != wire.served_bytes() || scales.size() != wire.scales()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "BindServed of ", tensors_.Name(tensor), ": got ", bytes, " bytes and ", scales.size(), " scales, wanted ",
        wire.served_bytes(), " and ", wire.scales(), " (", wire.held_elements(), " x ", wire.serving, ")"));
  }
  return Bind(tensor, {.weights = static_cast<std::byte*>(codes), .scales = scales.data(), .as_served = true});
}

absl::Status StepStream::Bind(uint32_t tensor, Destination destination) {
  const auto on_gpu = [this](const void* at) { return gpu_ != nullptr && at != nullptr && gpu_->Owns(at); };
  destination.on_gpu = on_gpu(destination.weights);
  destination.scales_on_gpu = on_gpu(destination.scales);
  absl::MutexLock lock(&mu_);
  if (step_ && (step_->pushed(tensor) || step_->pushed_all())) {  // also what other ranks alone have pushed comes
    return absl::FailedPreconditionError(
        absl::StrCat("BindWeights of ", tensors_.Name(tensor), ": its weights of step ", step_number_,
                     step_->pushed(tensor) ? " are" : " may be", " on their way; bind before Push or after the step"));
  }
  bound_[tensor] = destination;
  return absl::OkStatus();
}

absl::Status StepStream::BetweenSteps(absl::string_view call) const {
  if (!status_.ok() || !step_) return status_;
  return absl::FailedPreconditionError(
      absl::StrCat(call, " while step ", step_number_,
                   " is open: ", step_->ended() ? "wait for the result of its EndStep" : "call EndStep first"));
}

absl::Status StepStream::CheckBetweenSteps(absl::string_view call) const {
  absl::MutexLock lock(&mu_);
  return BetweenSteps(call);
}

absl::Status StepStream::BeginStep(const StepValues& values) {
  if (auto s = tensors_.limits().CheckBegin(values); !s.ok()) return s;
  absl::MutexLock lock(&mu_);
  if (!status_.ok()) return status_;
  if (values.micro_batches == 0) {
    if (auto s = CheckMeasures("BeginStep with micro_batches = 0"); !s.ok()) return s;
  }
  if (auto s = BetweenSteps("BeginStep"); !s.ok()) return s;
  step_number_ = std::max(step_number_, closed_elsewhere_ + 1);
  step_ = std::make_shared<OpenStep>(tensors_, MakeBegin(step_number_, values), values.micro_batches, absl::Now());
  return absl::OkStatus();
}

absl::Status StepStream::EndMicro(std::optional<double> loss, bool next_is_last) {
  absl::MutexLock lock(&mu_);
  if (!status_.ok()) return status_;
  if (!step_) return absl::FailedPreconditionError("EndMicro before BeginStep");
  if (auto s = step_->MayEndMicro(); !s.ok()) return s;
  if (auto s = tensors_.limits().CheckMicros("EndMicro", step_->micros() + 1); !s.ok()) return s;
  step_->EndMicro(loss, next_is_last);
  return absl::OkStatus();
}

absl::Status StepStream::CheckMeasures(absl::string_view what) const {
  if (!tensors_.staged()) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " needs a run whose commit is staged, but run '", options_.run_id,
                     "' has commit = release, and updates tensors before the step is whole: create it with "
                     "COMMIT_MODE_STAGED"));
  }
  if (measures_steps_) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(what, ": the daemon at ", connection_.server(),
                                               " is older than this client and does not know it; "
                                               "update the daemon"));
}

std::future<absl::StatusOr<MeasuredStep>> StepStream::MeasureStep(std::optional<double> loss) {
  absl::MutexLock lock(&mu_);
  if (!status_.ok()) return Ready<MeasuredStep>(status_);
  if (!step_) return Ready<MeasuredStep>(absl::FailedPreconditionError("MeasureStep before BeginStep"));
  if (auto s = CheckMeasures("MeasureStep"); !s.ok()) return Ready<MeasuredStep>(s);
  if (auto s = step_->MayMeasure(); !s.ok()) return Ready<MeasuredStep>(s);
  return step_->Measure(loss, absl::Now());
}

std::future<absl::StatusOr<StepResult>> StepStream::EndStep(std::optional<double> loss, const StepEndValues& values) {
  if (auto s = tensors_.limits().CheckEnd(values); !s.ok()) return Ready(s);
  FreedChunks freed(&memory_);  // outlives the lock
  std::shared_ptr<OpenStep> done;
  std::future<absl::StatusOr<StepResult>> future;
  const absl::Time now = absl::Now();
  {
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return Ready(status_);
    if (!step_) return Ready(absl::FailedPreconditionError("EndStep before BeginStep"));
    if (values.max_grad_norm || values.discard) {
      const char* what = values.discard ? "EndStep with discard" : "EndStep with max_grad_norm";
      if (auto s = CheckMeasures(what); !s.ok()) return Ready(s);
    }
    if (auto s = step_->MayEnd(values.discard); !s.ok()) return Ready(s);
    future = step_->End(loss, MakeEnd(values), now, freed.get());
    Release(freed.get());
    if (step_->done()) done = TakeStep();
  }
  if (done) done->Finish(done->result(now));
  return future;
}

absl::StatusOr<bool> StepStream::AwaitWeights(uint32_t tensor, absl::Duration timeout) {
  if (auto s = tensors_.CheckIndex(tensor); !s.ok()) return s;
  absl::MutexLock lock(&mu_);
  if (status_.ok() && step_ && !step_->ended()) {
    return absl::FailedPreconditionError(
        absl::StrCat("AwaitWeights of ", tensors_.Name(tensor), " before EndStep of step ", step_number_));
  }
  const auto in = [this, tensor]()
                      ABSL_NO_THREAD_SAFETY_ANALYSIS { return !status_.ok() || !step_ || step_->weights_in(tensor); };
  const bool arrived = mu_.AwaitWithTimeout(absl::Condition(&in), timeout);
  if (!status_.ok()) return status_;
  return arrived;
}

absl::StatusOr<v1::AttachResponse> StepStream::AttachAgain(bool progress) {
  {
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    if (progress) Progress();
    attach_again_ = true;
    attached_again_.reset();
  }
  Cancel();
  const auto decided = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return attached_again_ || !status_.ok(); };
  while (!connection_.Interrupted()) {
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithTimeout(absl::Condition(&decided), Connection::kInterruptGlance)) continue;
    if (!status_.ok()) return status_;
    return *std::exchange(attached_again_, std::nullopt);
  }
  return absl::CancelledError("interrupted while the daemon was away");
}

std::shared_ptr<OpenStep> StepStream::TakeStep() {
  step_number_ = std::max(step_number_, closed_elsewhere_) + 1;
  return std::exchange(step_, nullptr);
}

void StepStream::Fail(absl::Status status) {
  std::shared_ptr<OpenStep> step;
  {
    absl::MutexLock lock(&mu_);
    if (status_.ok()) status_ = status;
    step = std::exchange(step_, nullptr);
  }
  if (step) step->FinishMeasure(status);
  if (step && step->ended()) step->Finish(status);
}

}  // namespace ballast
