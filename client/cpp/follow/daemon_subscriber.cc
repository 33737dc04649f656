#include "client/cpp/follow/daemon_subscriber.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "client/cpp/follow/run_lookup.h"
#include "client/cpp/follow/subscribed_series.h"
#include "client/cpp/follow/version_tags.h"

namespace ballast {
namespace {

// Calls in a row that end on this side before that is told.
constexpr int kMostRefusals = 3;
// For an answer about the run as it is.
constexpr absl::Duration kAskTimeout = absl::Seconds(30);

// Whose weights are part of a run's, which are of use together alone.
absl::Status CheckAllHere(const Connection& connection, const v1::RunSpec& spec) {
  if (!spec.has_part()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the daemon at ", connection.server(), " has part ", spec.part().index(), " of ", spec.part().count(),
      " of run '", spec.run_id(), "' alone: name all daemons of the run, in their order, as its trainers do"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DaemonSubscriber>> DaemonSubscriber::Open(ClientOptions options,
                                                                         const SubscribeOptions& subscription) {
  return OpenHeld(std::move(options), subscription, nullptr);
}

absl::StatusOr<std::unique_ptr<DaemonSubscriber>> DaemonSubscriber::OpenHeld(ClientOptions options,
                                                                             const SubscribeOptions& subscription,
                                                                             std::shared_ptr<ChangeSignal> changes) {
  if (auto s = CheckSubscription(subscription); !s.ok()) return s;
  auto closing = std::make_shared<std::atomic<bool>>(false);
  options.interrupted = [closing, asked = std::move(options.interrupted)] { return *closing || (asked && asked()); };
  auto connection = Connection::Open(std::move(options));
  if (!connection.ok()) return connection.status();
  auto run = LookUpRun(**connection, subscription.run_id, absl::Seconds(subscription.wait_for_run_s));
  if (!run.ok()) return run.status();
  if (auto s = CheckFollowed(**connection, run->spec(), subscription); !s.ok()) return s;
  if (auto s = CheckAllHere(**connection, run->spec()); !s.ok() && changes == nullptr) return s;
  if (!subscription.tag.empty()) {
    if (auto s = CheckTag(**connection, subscription.run_id, subscription.tag); !s.ok()) return s;
  }
  ServeIn(subscription.format, run->mutable_spec());
  auto weights = FollowedWeights::Create(run->spec(), run->status().plan().chunk_elements());
  if (!weights.ok()) return weights.status();
  return std::unique_ptr<DaemonSubscriber>(new DaemonSubscriber(*std::move(connection), std::move(closing),
                                                                subscription, *std::move(weights), std::move(changes)));
}

DaemonSubscriber::DaemonSubscriber(std::unique_ptr<Connection> connection, std::shared_ptr<std::atomic<bool>> closing,
                                   SubscribeOptions subscription, FollowedWeights weights,
                                   std::shared_ptr<ChangeSignal> changes)
    : connection_(std::move(connection)),
      closing_(std::move(closing)),
      subscription_(std::move(subscription)),
      held_(changes != nullptr),
      what_(absl::StrCat("following run '", subscription_.run_id, "'")),
      exchange_(std::move(changes)),
      wish_{.tag = subscription_.tag, .every = subscription_.every},
      weights_(std::move(weights)),
      changed_(subscription_.marks_changed ? std::optional<ChangedElements>(weights_.tensors()) : std::nullopt),
      touched_(weights_.tensors().size()),
      thread_([this] { Receive(); }) {}

DaemonSubscriber::~DaemonSubscriber() {
  Close();
  thread_.join();
}

void DaemonSubscriber::Close() {
  *closing_ = true;
  exchange_.Close();
  absl::MutexLock lock(&mu_);
  if (call_ != nullptr) call_->TryCancel();
  if (asks_ != nullptr) asks_->TryCancel();
}

absl::StatusOr<std::optional<FollowedVersion>> DaemonSubscriber::Next(double timeout_s) {
  return exchange_.Next(absl::Seconds(timeout_s));
}

bool DaemonSubscriber::Await(double timeout_s) { return exchange_.Await(absl::Seconds(timeout_s)); }

template <typename Stub, typename Asked, typename Answer>
absl::Status DaemonSubscriber::AskNow(Stub& stub,
                                      grpc::Status (Stub::*method)(grpc::ClientContext*, const Asked&, Answer*),
                                      Asked request, Answer* response) {
  request.set_run_id(subscription_.run_id);
  ScopedCall call(&mu_, &asks_, [this] { return exchange_.closed(); });
  call.context.set_deadline(absl::ToChronoTime(absl::Now() + kAskTimeout));
  return FromGrpc((stub.*method)(&call.context, request, response), call.context);
}

absl::StatusOr<HeldSubscriber::Timeline> DaemonSubscriber::Now() {
  v1::GetRunResponse run;
  v1::ListVersionsResponse versions;
  if (auto s = AskNow(connection_->admin(), &v1::AdminService::Stub::GetRun, v1::GetRunRequest(), &run); !s.ok()) {
    return s;
  }
  v1::ListVersionsRequest of_series;
  of_series.set_format(subscription_.format);
  if (subscription_.average) of_series.set_average(*subscription_.average);
  if (auto s = AskNow(connection_->follow(), &v1::FollowService::Stub::ListVersions, of_series, &versions); !s.ok()) {
    return s;
  }
  Timeline now{.generation = run.status().generation()};
  if (versions.has_newest()) now.epoch = versions.newest().epoch();
  return now;
}

void DaemonSubscriber::EndVersion() {
  touched_.assign(touched_.size(), false);
  respecified_ = false;
  if (changed_) changed_->EndVersion();
}

// --- the receiver's thread -------------------------------------------------------------------------------------------

void DaemonSubscriber::Receive() {
  for (Retry retry(*connection_, what_);;) {
    const uint64_t before = versions_;
    LearnWanted();
    absl::Status refused;
    const absl::Status status = SubscribeOnce(&refused);
    if (exchange_.closed()) return;
    if (versions_ > before) retry.Progress();
    if (HasTurned()) continue;  // the call was cancelled for it
    if (status.ok() && refused.ok()) {
      AwaitTurn();
      if (exchange_.closed()) return;
      continue;
    }
    auto final = Judge(status, refused, &retry);
    if (exchange_.closed()) return;
    if (final) return exchange_.Fail(*std::move(final));
  }
}

std::optional<absl::Status> DaemonSubscriber::Judge(const absl::Status& status, const absl::Status& refused,
                                                    Retry* retry) {
  // A request may also be wrong because the run was amended since its spec was read.
  const absl::Status& wrong = refused.ok() ? status : refused;
  if (!refused.ok() || absl::IsInvalidArgument(status)) {
    if (++refusals_ == kMostRefusals) return absl::Status(wrong.code(), absl::StrCat(what_, ": ", wrong.message()));
    if (refusals_ > 1) Forget();
    connection_->Log(absl::StrCat(what_, ": ", wrong.message(), "; asking for it again"));
    return std::nullopt;
  }
  if (absl::IsUnimplemented(status)) return OlderThanFollowing(*connection_);
  if (absl::IsNotFound(status) && !asked_.tag.empty()) {
    return absl::NotFoundError(absl::StrCat(what_, ": ", status.message()));
  }
  if (absl::IsNotFound(status)) {
    return absl::NotFoundError(absl::StrCat(what_, ": the daemon at ", connection_->server(), " no longer has it (",
                                            status.message(),
                                            "): it was deleted, or the daemon was started again without it"));
  }
  if (retry->Again(status)) return std::nullopt;
  return retry->Explain(status);
}

absl::Status DaemonSubscriber::SubscribeOnce(absl::Status* refused) {
  if (calls_++ > 0) {
    if (auto s = ReadSpecAgain(); !s.ok()) return s;
  }
  const uint64_t before = versions_;
  ScopedCall call(&mu_, &call_, [this] { return IsCancelled(); });
  const auto reader = connection_->follow().Subscribe(&call.context, Request());
  v1::VersionPart part;
  while (refused->ok() && reader->Read(&part)) {
    if (part.batch().empty()) *refused = Take(&part);
    for (int i = 0; i < part.batch_size() && refused->ok(); ++i) *refused = Take(part.mutable_batch(i));
  }
  if (!refused->ok()) {
    call.context.TryCancel();
    while (reader->Read(&part)) continue;
  }
  const absl::Status status = FromGrpc(reader->Finish(), call.context);
  incoming_.reset();
  DropChanges();
  if (status.ok() && (asked_.tag.empty() || versions_ == before)) {
    return absl::UnavailableError("the daemon has ended the call");
  }
  return status;
}

// The daemon ends the calls of a run that is amended.
absl::Status DaemonSubscriber::ReadSpecAgain() {
  v1::GetRunRequest request;
  request.set_run_id(subscription_.run_id);
  v1::GetRunResponse run;
  {
    ScopedCall call(&mu_, &call_, [this] { return IsCancelled(); });
    call.context.set_deadline(absl::ToChronoTime(absl::Now() + Connection::kCallTimeout));
    const absl::Status status = FromGrpc(connection_->admin().GetRun(&call.context, request, &run), call.context);
    if (!status.ok()) return status;
  }
  if (auto s = CheckFollowed(*connection_, run.spec(), subscription_); !s.ok()) return s;
  ServeIn(subscription_.format, run.mutable_spec());
  const uint64_t chunk_elements = run.status().plan().chunk_elements();
  if (weights_.Fit(run.spec(), chunk_elements)) return absl::OkStatus();
  auto weights = FollowedWeights::Create(run.spec(), chunk_elements);
  if (!weights.ok()) return weights.status();
  if (!exchange_.TakeWeights(/*all_here=*/false, std::nullopt)) return absl::CancelledError("closed");
  weights_ = *std::move(weights);
  have_.reset();
  touched_.assign(weights_.tensors().size(), false);
  if (changed_) changed_.emplace(weights_.tensors());
  respecified_ = true;
  return absl::OkStatus();
}

v1::SubscribeRequest DaemonSubscriber::Request() const {
  v1::SubscribeRequest request;
  request.set_run_id(subscription_.run_id);
  if (asked_.tag.empty()) {
    AskForWanted(&request);
    if (subscription_.average) request.set_average(*subscription_.average);
    request.set_format(subscription_.format);
  } else {
    request.mutable_version()->set_tag(asked_.tag);
  }
  const auto& digests = weights_.digests();
  const auto known = [](const auto& digest) { return digest.has_value(); };
  if (std::any_of(digests.begin(), digests.end(), known)) {
    for (const auto& digest : digests) request.add_digests(digest.value_or(0));  // 0: of nothing that is here
  }
  return request;
}

absl::Status DaemonSubscriber::Take(v1::VersionPart* part) {
  switch (part->part_case()) {
    case v1::VersionPart::kBegin:
      return TakeBegin(part->begin());
    case v1::VersionPart::kChunk:
      return TakeChunk(part->mutable_chunk());
    case v1::VersionPart::kEnd:
      return TakeEnd(part->end());
    default:
      return absl::OkStatus();  // what this client does not know
  }
}

absl::Status DaemonSubscriber::TakeBegin(const v1::VersionBegin& begin) {
  if (incoming_) return absl::InternalError("a version began before the one before it ended");
  auto incoming =
      IncomingVersion::Begin(begin, coming_ ? coming_ : have_, weights_.tensors(), weights_.bytes(), way_bytes_);
  if (!incoming.ok()) return incoming.status();
  incoming_ = *std::move(incoming);
  if (!incoming_->whole()) return absl::OkStatus();
  DropChanges();
  if (!exchange_.TakeWeights(/*all_here=*/false, incoming_->id())) return absl::CancelledError("closed");
  have_.reset();
  return absl::OkStatus();
}

absl::Status DaemonSubscriber::TakeChunk(v1::ChangedChunk* chunk) {
  if (!incoming_) return absl::InternalError("a chunk came outside of a version");
  if (auto s = incoming_->Take(*chunk); !s.ok()) return s;
  if (incoming_->whole()) return Write(*chunk);
  changes_.push_back(std::move(*chunk));
  return absl::OkStatus();
}

absl::Status DaemonSubscriber::TakeEnd(const v1::VersionEnd& end) {
  if (!incoming_) return absl::InternalError("the end of a version came, and none had begun");
  auto version = incoming_->End(end);
  if (!version.ok()) return version.status();
  version->received_bytes += way_bytes_;
  version->changed_elements = std::min(version->changed_elements + way_elements_, version->elements);
  if (!incoming_->whole() && !IsWanted(incoming_->id())) {
    coming_ = incoming_->id();
    way_bytes_ = version->received_bytes;
    way_elements_ = version->changed_elements;
  } else {
    if (version->base_step) version->base_step = have_->step();
    if (auto s = incoming_->whole() ? CheckNoneLacks() : WriteChanges(); !s.ok()) return s;
    have_ = incoming_->id();
    Publish(*std::move(version));
  }
  incoming_.reset();
  refusals_ = 0;
  ++versions_;
  return absl::OkStatus();
}

// Of a version that came whole: tensors may be left out that are here as the digests said.
absl::Status DaemonSubscriber::CheckNoneLacks() const {
  for (uint32_t i = 0; i < weights_.tensors().size(); ++i) {
    if (weights_.digests()[i]) continue;
    return absl::InternalError(absl::StrCat("a version came whole, but for ", weights_.tensors().Name(i)));
  }
  return absl::OkStatus();
}

absl::Status DaemonSubscriber::WriteChanges() {
  if (!exchange_.TakeWeights(/*all_here=*/true, incoming_->id())) return absl::CancelledError("closed");
  have_.reset();
  const std::vector<v1::ChangedChunk> changes = std::exchange(changes_, {});
  DropChanges();
  for (const v1::ChangedChunk& chunk : changes) {
    if (auto s = Write(chunk); !s.ok()) {
      Forget();
      exchange_.Spoil();
      return s;
    }
  }
  return absl::OkStatus();
}

absl::Status DaemonSubscriber::Write(const v1::ChangedChunk& chunk) {
  touched_[chunk.tensor()] = true;
  if (auto s = weights_.Apply(chunk); !s.ok()) return s;
  if (changed_) changed_->Add(chunk);
  return absl::OkStatus();
}

void DaemonSubscriber::DropChanges() {
  changes_.clear();
  coming_.reset();
  way_bytes_ = way_elements_ = 0;
}

// The next call asks for all.
void DaemonSubscriber::Forget() {
  have_.reset();
  weights_.Forget();
}

void DaemonSubscriber::Publish(FollowedVersion version) {
  version.whole_bytes = weights_.bytes();
  version.respecified = respecified_;
  for (uint32_t i = 0; i < touched_.size(); ++i) {
    if (touched_[i]) version.changed.push_back(i);
  }
  version.tag = asked_.tag;
  const bool same = asked_.tag.empty() && told_ && IsSameVersion(*told_, *have_);
  if (same && version.changed.empty() && !respecified_) return exchange_.GiveBack();
  told_ = have_;
  if (!held_) EndVersion();
  exchange_.Publish(std::move(version), *told_);
}

}  // namespace ballast
