#include "server/relay/relay.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/retry_after.h"

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/convert/convert.h"
#include "server/metrics/metric_table.h"
#include "server/relay/relayed_spec.h"

namespace ballast {
namespace {

constexpr double kConnectTimeoutS = 3, kForeverS = 1e9;         // Stop waits for a connection that is being made
constexpr absl::Duration kPause = absl::Seconds(2);             // where asking again at once is of no use
constexpr absl::Duration kRoomGlance = absl::Milliseconds(20);  // while a version waits for memory

const char* ReasonOf(const absl::Status& status) { return IsLost(status) ? "unreachable" : "refused"; }

ClientOptions OptionsOf(const Config::Relay& relay, const std::string& run_id, const absl::Notification* stop) {
  return {.server = relay.upstream,
          .tls = {.ca = relay.ca, .certificate = relay.certificate, .key = relay.key},
          .token_file = relay.token_file,
          .connect_timeout_s = kConnectTimeoutS,
          .reconnect_timeout_s = kForeverS,
          .log =
              [run_id](const std::string& line) {
                Log(LogLevel::kDebug, "relay", line, {{"run_id", run_id}});
              },
          .interrupted = [stop] { return stop->HasBeenNotified(); }};
}

}  // namespace

Relay::Relay(Options options)
    : options_(std::move(options)),
      metrics_(options_.metrics->AddRelayed(options_.run_id)),
      why_none_(absl::UnavailableError(absl::StrCat("this relay has not heard of run '", options_.run_id, "' from ",
                                                    options_.relay.upstream, " yet"))) {
  {
    absl::MutexLock lock(&mu_);
    status_.set_upstream(options_.relay.upstream);
    status_.set_failure(std::string(why_none_.message()));
  }
  metrics_->OnRelay({});
  thread_ = std::thread([this] { Loop(); });
}

void Relay::Stop(const absl::Status& why) {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mu_);
    end_ = why;
    stop_.Notify();
    if (call_ != nullptr) call_->TryCancel();
  }
  thread_.join();
}

// --- what others ask --------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<RelayedRun>> Relay::Find() const {
  absl::MutexLock lock(&mu_);
  if (run_ != nullptr) return run_;
  return absl::IsUnavailable(why_none_) ? WithRetryAfter(why_none_, 1) : why_none_;
}

v1::RunStatus Relay::Status() const {
  absl::MutexLock lock(&mu_);
  const v1::RunStatus& there = answer_.status();
  v1::RunStatus out;
  out.set_run_id(options_.run_id);
  out.set_state(v1::RUN_STATE_RELAYED);
  *out.mutable_relay() = status_;
  if (run_ == nullptr) return out;
  const FollowFigures figures = run_->figures();
  *out.mutable_plan() = there.plan();
  out.mutable_plan()->mutable_server()->Clear();
  out.mutable_plan()->mutable_server()->set_following(run_->plan().bytes.following);
  out.mutable_plan()->clear_devices();
  *out.mutable_bytes() = out.plan().server();
  out.set_parameters(run_->plan().parameters);
  out.set_optimizer(there.optimizer());
  *out.mutable_follow() = FromFollow(figures);
  if (!figures.newest) return out;
  out.set_weights_loaded(true);
  out.set_step(figures.newest->step);
  out.set_generation(figures.newest->generation);
  return out;
}

absl::StatusOr<v1::GetRunResponse> Relay::GetRun() const {
  if (auto run = Find(); !run.ok()) return run.status();
  v1::GetRunResponse out;
  *out.mutable_status() = Status();
  absl::MutexLock lock(&mu_);
  *out.mutable_spec() = answer_.spec();
  out.set_spec_sha256(answer_.spec_sha256());
  return out;
}

double Relay::busy_s() const {
  absl::MutexLock lock(&mu_);
  return run_ == nullptr ? 0 : run_->busy_s();
}

// --- the relay's thread -----------------------------------------------------------------------------------------------

void Relay::Loop() {
  while (!stop_.HasBeenNotified()) {
    progressed_ = false;
    const Failure failure = FollowOnce();
    if (stop_.HasBeenNotified()) break;
    Report(failure);
    Pause(failure);
  }
  absl::Status end;
  {
    absl::MutexLock lock(&mu_);
    end = end_;
  }
  Drop(end);
}

Relay::Failure Relay::FollowOnce() {
  if (auto s = Connect(); !s.ok()) return {s, "unreachable"};
  v1::GetServerResponse server;
  if (auto s = Ask(&v1::AdminService::Stub::GetServer, v1::GetServerRequest(), &server); !s.ok())
    return {s, ReasonOf(s)};
  if (auto s = options_.path->Learn(server); !s.ok()) return {s, "circle", /*gone=*/true};
  v1::GetRunRequest request;
  request.set_run_id(options_.run_id);
  v1::GetRunResponse answer;
  if (auto s = Ask(&v1::AdminService::Stub::GetRun, request, &answer); !s.ok()) {
    // A relay there says FAILED_PRECONDITION where it cannot serve the run.
    return {s, ReasonOf(s), /*gone=*/absl::IsNotFound(s) || absl::IsFailedPrecondition(s)};
  }
  if (Failure f = Adopt(answer); !f.status.ok()) return f;
  return Receive();
}

absl::Status Relay::Connect() {
  if (connection_ != nullptr) return absl::OkStatus();
  auto opened = Connection::Open(OptionsOf(options_.relay, options_.run_id, &stop_));
  if (!opened.ok()) return opened.status();
  connection_ = *std::move(opened);
  retry_.emplace(*connection_, absl::StrCat("relaying run '", options_.run_id, "'"));
  return absl::OkStatus();
}

template <typename Request, typename Response>
absl::Status Relay::Ask(grpc::Status (v1::AdminService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                        const Request& request, Response* response) {
  ScopedCall call(&mu_, &call_, [this] { return stop_.HasBeenNotified(); });
  call.context.set_deadline(absl::ToChronoTime(absl::Now() + Connection::kCallTimeout));
  return FromGrpc((connection_->admin().*method)(&call.context, request, response), call.context);
}

Relay::Failure Relay::Adopt(const v1::GetRunResponse& answer) {
  if (!answer.spec().has_follow()) {
    return {absl::FailedPreconditionError(
                absl::StrCat("run '", options_.run_id,
                             "' has no RunSpec.follow, so nobody may follow it: create the run with "
                             "follow, or amend it (AmendRun)")),
            "refused", /*gone=*/true};
  }
  if (answer.spec().has_part()) {
    return {absl::FailedPreconditionError(
                absl::StrCat("run '", options_.run_id,
                             "' is on several daemons, and a relay has runs of one: its readers follow it there")),
            "refused", /*gone=*/true};
  }
  auto spec = ToRelayedSpec(answer, options_.limits);
  if (!spec.ok()) return {spec.status(), "spec", /*gone=*/true};
  if (served_ == nullptr || !ServeTheSame(served_->spec(), *spec)) return Begin(answer, *std::move(spec));
  absl::MutexLock lock(&mu_);
  answer_ = answer;
  return {};
}

Relay::Failure Relay::Begin(const v1::GetRunResponse& answer, RunSpec spec) {
  Drop(absl::UnavailableError(
      absl::StrCat("run '", options_.run_id, "' was amended: it has other tensors, or formats; subscribe again")));
  auto tensors = TensorTable::Create(answer.spec(), spec.chunk_elements);
  if (!tensors.ok()) return {tensors.status(), "spec", /*gone=*/true};
  Plan plan = RelayedPlan(spec, options_.relay.readers);
  if (auto s = options_.memory->Reserve(options_.run_id, plan); !s.ok()) return {s, "memory", /*gone=*/true};
  tensors_ = *std::move(tensors);
  whole_bytes_ = 0;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    whole_bytes_ += tensors_[i].served_bytes() + tensors_[i].scales() * sizeof(float);
  }
  served_ = std::make_shared<RelayedRun>(RelayedRun::Options{
      .spec = std::move(spec), .plan = std::move(plan), .readers = options_.relay.readers, .metrics = metrics_.get()});
  absl::MutexLock lock(&mu_);
  run_ = served_;
  answer_ = answer;
  return {};
}

Relay::Failure Relay::Receive() {
  ScopedCall call(&mu_, &call_, [this] { return stop_.HasBeenNotified(); });
  const auto reader = connection_->follow().Subscribe(&call.context, WhatToSend());
  if (!refused_) Show(/*connected=*/true);
  if (newest_ == nullptr) served_->SayWhyNone(absl::OkStatus());
  v1::VersionPart part;
  absl::Status refused;
  while (refused.ok() && reader->Read(&part)) {
    if (part.batch().empty()) refused = Take(part);
    for (int i = 0; i < part.batch_size() && refused.ok(); ++i) refused = Take(part.batch(i));
  }
  if (!refused.ok()) {
    call.context.TryCancel();
    while (reader->Read(&part)) continue;
  }
  const absl::Status status = FromGrpc(reader->Finish(), call.context);
  incoming_.reset();
  assembly_.reset();
  if (!refused.ok()) {
    trusted_ = false;
    return {refused, "damaged"};
  }
  if (status.ok()) return {absl::UnavailableError("the upstream has ended the call"), "unreachable"};
  return {status, ReasonOf(status), absl::IsNotFound(status)};
}

v1::SubscribeRequest Relay::WhatToSend() const {
  v1::SubscribeRequest request;
  request.set_run_id(options_.run_id);
  if (!trusted_) return request;
  *request.mutable_have() = FromVersionId(newest_->id);
  request.mutable_digests()->Add(newest_->digests.begin(), newest_->digests.end());
  return request;
}

absl::Status Relay::Take(const v1::VersionPart& part) {
  switch (part.part_case()) {
    case v1::VersionPart::kBegin:
      return TakeBegin(part.begin());
    case v1::VersionPart::kChunk:
      if (!incoming_) return absl::InternalError("a chunk came outside of a version");
      if (auto s = incoming_->Take(part.chunk()); !s.ok()) return s;
      return assembly_->Take(part.chunk());
    case v1::VersionPart::kEnd:
      return TakeEnd(part.end());
    default:
      return absl::OkStatus();  // what this relay does not know
  }
}

absl::Status Relay::TakeBegin(const v1::VersionBegin& begin) {
  if (incoming_) return absl::InternalError("a version began before the one before it ended");
  const auto have = trusted_ ? std::optional(FromVersionId(newest_->id)) : std::nullopt;
  auto incoming = IncomingVersion::Begin(begin, have, tensors_, whole_bytes_);
  if (!incoming.ok()) return incoming.status();
  while (!served_->HasRoom()) {
    if (stop_.WaitForNotificationWithTimeout(kRoomGlance)) return absl::CancelledError("the relay is shutting down");
  }
  began_ = absl::Now();
  incoming_ = *std::move(incoming);
  assembly_.emplace(*served_, begin, trusted_ ? newest_ : nullptr, newest_ == nullptr ? 0 : newest_->number);
  return absl::OkStatus();
}

absl::Status Relay::TakeEnd(const v1::VersionEnd& end) {
  if (!incoming_) return absl::InternalError("the end of a version came, and none had begun");
  const auto came = incoming_->End(end);
  if (!came.ok()) return came.status();
  auto made = assembly_->End(end);
  if (!made.ok()) return made.status();
  constexpr FamilyRef kReceived = "ballast_relay_received_bytes_total";
  metrics_->Count(kReceived, incoming_->whole() ? "whole" : "changes", static_cast<double>(came->received_bytes));
  incoming_.reset();
  assembly_.reset();
  newest_ = made->version;
  trusted_ = true;
  progressed_ = true;
  refused_ = false;
  reported_.clear();
  served_->Publish(made->version, made->change, absl::ToDoubleSeconds(absl::Now() - began_));
  {
    absl::MutexLock lock(&mu_);
    status_.set_received_bytes(status_.received_bytes() + came->received_bytes);
    status_.set_closed_unix_s(newest_->closed_unix_s);
  }
  Show(/*connected=*/true);
  return absl::OkStatus();
}

void Relay::Drop(const absl::Status& why) {
  newest_ = nullptr;
  trusted_ = false;
  if (served_ == nullptr) return;
  {
    absl::MutexLock lock(&mu_);
    run_ = nullptr;
    why_none_ = why;
    answer_.Clear();
    status_.set_closed_unix_s(0);
  }
  served_->End(why);
  options_.memory->Release(served_->plan());
  served_ = nullptr;
}

void Relay::Report(const Failure& failure) {
  metrics_->Count("ballast_relay_failures_total", failure.reason, 1);
  const std::string what(failure.status.message());
  const absl::Status told(failure.status.code(), absl::StrCat("run '", options_.run_id, "' is relayed from ",
                                                              options_.relay.upstream, ": ", what));
  if (failure.gone) Drop(told);
  refused_ = failure.reason == std::string_view("refused");
  {
    absl::MutexLock lock(&mu_);
    status_.set_failure(what);
    if (served_ == nullptr) why_none_ = failure.gone ? told : absl::UnavailableError(told.message());
  }
  Show(/*connected=*/false);
  // Also where the upstream has no weights yet: by the time that a reader is told so here it may have.
  if (served_ != nullptr && newest_ == nullptr) served_->SayWhyNone(absl::UnavailableError(told.message()));
  if (std::exchange(reported_, what) == what) return;
  Log(LogLevel::kWarn, "relay_failed", "nothing comes from the upstream; it is tried again",
      {{"run_id", options_.run_id}, {"upstream", options_.relay.upstream}, {"reason", failure.reason}, {"err", what}});
}

void Relay::Pause(const Failure& failure) {
  if (retry_ && progressed_) retry_->Progress();
  const bool again = retry_ && !failure.gone && retry_->Again(failure.status);
  if (!again) stop_.WaitForNotificationWithTimeout(kPause);
}

void Relay::Show(bool connected) {
  RelayFigures figures{.connected = connected};
  {
    absl::MutexLock lock(&mu_);
    if (connected && !status_.connected()) {
      status_.set_connected_since_unix_s(UnixSeconds());
      status_.clear_failure();
    }
    status_.set_connected(connected);
    status_.set_relays_above(static_cast<uint32_t>(options_.path->info().above_size()));
    figures.closed_unix_s = status_.closed_unix_s();
  }
  metrics_->OnRelay(figures);
}

}  // namespace ballast
