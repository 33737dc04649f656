// How a streaming call lives and ends, whatever it carries: what the reactors of Train, Pull and LoadState share.
//
// The object belongs to gRPC, until OnDone, and to the run, until it lets go. Every path, cancelled at any point or
// not, comes to End; the first status stands, gRPC hears of it once, and the call is recorded once. Thread-safe: gRPC's
// reactions come on its threads, the run's on the strand. A derived class guards its own state by the same lock.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/rpc/rpc.h"

namespace ballast {

// GrpcReactor: grpc::ServerBidiReactor, ServerWriteReactor or ServerReadReactor, of the call's messages.
template <class GrpcReactor>
class StreamCall : public GrpcReactor {
 public:
  void OnCancel() override { End(absl::CancelledError("the connection was lost")); }
  void OnDone() final {
    const std::shared_ptr<void> self = std::move(self_);
    {
      absl::MutexLock lock(&mu_);
      context_ = nullptr;
      Record(ended_with_);
    }
    place_.reset();
    OnGone();
  }

 protected:
  // `context` is told of the end and cancelled by TryCancel alone, and may be nullptr.
  StreamCall(Metrics* metrics, const char* method, const std::string& peer, grpc::CallbackServerContext* context)
      : record_(metrics, method, peer), context_(context) {}

  // Makes the call of one request: a Stream, of the environment and the context, whose Begin says what is wrong with it.
  template <class Stream, class Request>
  static Stream* StartOf(const RpcEnvironment& environment, grpc::CallbackServerContext* context,
                         const Request& request) {
    const std::shared_ptr<Stream> stream(new Stream(environment, context));
    stream->HoldUntilDone(stream);
    stream->record_.set_run_id(request.run_id());
    const absl::Status begun = stream->Begin(*context, request);
    if (!begun.ok()) stream->End(begun);
    return stream.get();
  }

  // Holds the object until OnDone; first of all.
  void HoldUntilDone(std::shared_ptr<void> self) { self_ = std::move(self); }
  void End(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    if (std::exchange(ended_, true)) return;
    ended_with_ = status;
    if (context_ != nullptr) TellRetryAfter(context_, status);
    TellGrpc(status);
  }
  // Ends it at once, whatever the peer does.
  void TryCancel() {
    absl::MutexLock lock(&mu_);
    if (context_ != nullptr) context_->TryCancel();
  }

  absl::Mutex mu_;
  RpcRecord record_;
  StreamPlace place_;                                          // set before the run has the stream
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mu_);  // nullptr after OnDone
  bool ended_ ABSL_GUARDED_BY(mu_) = false;

 private:
  // Finishes the call, now or as soon as all is written. Called once.
  virtual void TellGrpc(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  virtual void Record(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { record_.Done(status); }
  // gRPC has let go.
  virtual void OnGone() {}

  std::shared_ptr<void> self_;  // until OnDone
  absl::Status ended_with_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
