// One Train call, the gRPC transport: checks what the rank sends, posts it to the run's strand without a copy, and
// writes what the run answers.
//
// gRPC calls the reactions on its threads; the strand calls RankStream's methods. Its life and its end: stream_call.h.
// A stream whose first message does not come within open_timeout_s is ended. Memory: at most kMostUnconsumed messages,
// or one batch, that the strand has not yet consumed, and with NCCL as many small ones as make kMostByNccl; one message that
// waits to be written; and the ResponseQueue.
//
// Where Open asks for it, payloads go by NCCL beside the call (server/nccl/): gradients then wait in slots on the run's device,
// where weights are encoded too. An error there ends the stream, which the trainer resumes.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "server/nccl/nccl_lane.h"
#include "server/rpc/response_queue.h"
#include "server/rpc/stream_call.h"
#include "server/run/rank_stream.h"

namespace ballast {

class TrainStream final : public StreamCall<grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>>,
                          public RankStream,
                          public std::enable_shared_from_this<TrainStream> {
 public:
  static constexpr int kMostUnconsumed = 8, kMostByNccl = 64;  // the latter where all are small

  static TrainStream* Start(const RpcEnvironment& environment, grpc::CallbackServerContext* context);

  Written WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) override;
  void TakeBack(WeightPiece* piece) override;
  bool Lend(WeightPiece* piece, bool small) override;
  void Unlend(WeightPiece* piece) override;
  Written Write(const StreamOutput& output) override;
  void Flush() override;
  void Finish(absl::Status status) override { End(status); }
  void Cancel() override { TryCancel(); }
  void Consumed() override;
  const std::string& peer() const override { return peer_; }
  const char* transport() const override { return on_device() ? "nccl" : "grpc"; }
  bool on_device() const override { return lane_ != nullptr; }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;

 private:
  using Reactor = grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>;

  TrainStream(const RpcEnvironment& environment, grpc::CallbackServerContext* context);
  absl::Status CheckCaller(const grpc::CallbackServerContext& context);
  void OnOpenOverdue();
  absl::Status Bind();
  // By NCCL, as the rank asks; or why_no_nccl_ says why not.
  void OpenLane(const Run& run, const v1::NcclIds& ids);
  void StartLane();
  void OnLaneLost(const absl::Status& why);
  void ReadOn();
  void Take(const std::shared_ptr<Run>& bound);
  void HandOver(const std::shared_ptr<Run>& bound, v1::TrainRequest* request, Payload payload);
  // What waited for NCCL; nullptr: the rank says no more.
  void OnQueued(v1::TrainRequest* request, Payload payload);
  Written Send();
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellGrpc(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override;
  void Record(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) override;
  void OnGone() override;
  std::shared_ptr<Run> run();

  const RpcEnvironment environment_;
  const std::string peer_;
  Caller caller_;               // set before the first read
  grpc::Alarm open_alarm_;      // when the first message is overdue
  v1::TrainRequest request_;    // of the read under way
  v1::TrainResponse response_;  // what the strand sends

  // Both from Open on, before the run has the stream.
  std::shared_ptr<NcclLane> lane_;
  std::string why_no_nccl_;

  std::shared_ptr<Run> run_ ABSL_GUARDED_BY(mu_);  // from Open on
  ResponseQueue out_ ABSL_GUARDED_BY(mu_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mu_);  // waits for what is in out_
  bool reading_ ABSL_GUARDED_BY(mu_) = false;
  bool input_closed_ ABSL_GUARDED_BY(mu_) = false;
  int unconsumed_ ABSL_GUARDED_BY(mu_) = 0;
  bool large_ ABSL_GUARDED_BY(mu_) = false;  // one of them may be
};

}  // namespace ballast
