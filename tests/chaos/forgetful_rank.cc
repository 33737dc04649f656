#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "tests/chaos/chaos_rank.h"

namespace ballast::chaos {
namespace {

constexpr int kMostAttempts = 100;

class ForgetfulRank final : public Rank {
 public:
  using Rank::Rank;
  ~ForgetfulRank() override { Leave(); }

  absl::Status Join(const std::string& server) override {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::TrainerService::NewStub(channel);
    return Attach();
  }

  absl::Status Step(uint64_t step) override {
    const std::vector<v1::TrainRequest> requests = Requests(step);
    for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
      if (stream_ == nullptr && !Open()) continue;
      const bool sent = attached_.resume_step() > step || Send(requests);
      const auto result = sent ? ReadResult(step) : std::nullopt;
      if (!result) {
        Leave();
        if (auto s = Attach(); !s.ok()) return s;
      } else if (result->outcome() != v1::STEP_OUTCOME_APPLIED) {
        return absl::InternalError(absl::StrCat("step ", step, " ended as ", result->ShortDebugString()));
      } else {
        return absl::OkStatus();
      }
    }
    return absl::UnavailableError(absl::StrCat("step ", step, " was cut ", kMostAttempts, " times"));
  }

 private:
  using Stream = grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>;

  absl::Status Attach() {
    v1::AttachRequest request;
    request.set_run_id(kRun);
    request.set_rank(rank_);
    request.set_world(kWorld);
    request.set_protocol_min(1);
    request.set_protocol_max(1);
    request.set_session_token(attached_.session_token());
    grpc::Status status;
    for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      status = stub_->Attach(&context, request, &attached_);
      if (status.error_code() != grpc::UNAVAILABLE) break;
    }
    return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
  }

  bool Open() {
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_wait_for_ready(true);
    stream_ = stub_->Train(context_.get());
    v1::TrainRequest request;
    request.mutable_open()->set_session_token(attached_.session_token());
    v1::TrainResponse response;
    if (stream_->Write(request) && stream_->Read(&response) && response.has_opened()) return true;
    Leave();
    return false;
  }

  void Leave() {
    if (stream_ == nullptr) return;
    context_->TryCancel();
    v1::TrainResponse response;
    while (stream_->Read(&response)) {
    }
    stream_->Finish().ok();  // cancelled, or lost before
    stream_.reset();
  }

  bool Send(const std::vector<v1::TrainRequest>& requests) {
    return std::all_of(requests.begin(), requests.end(), [&](const auto& request) { return stream_->Write(request); });
  }

  std::vector<v1::TrainRequest> Requests(uint64_t step) const {
    std::vector<v1::TrainRequest> requests(1);
    requests[0].mutable_step_begin()->set_step(step);
    requests[0].mutable_step_begin()->set_loss_scale(1);
    requests[0].mutable_step_begin()->add_groups()->set_lr(1e-2);
    const uint32_t micros = Micros(options_, step);
    for (uint32_t micro = 0; micro < micros; ++micro) {
      v1::MicroBegin* begin = requests.emplace_back().mutable_micro_begin();
      begin->set_micro(micro);
      begin->set_last(micro + 1 == micros);
      uint8_t absent = 0;
      for (uint32_t i = kTensors; i-- > 0;) {
        const std::vector<float> gradient = Gradient(step, micro, i);
        if (gradient.empty()) absent = static_cast<uint8_t>(absent | 1u << i);
        AddChunks(micro, i, gradient, &requests);
      }
      v1::MicroEnd* end = requests.emplace_back().mutable_micro_end();
      end->set_micro(micro);
      end->set_absent(std::string(1, static_cast<char>(absent)));
      end->set_loss(0.5);
    }
    requests.emplace_back().mutable_step_end();
    return requests;
  }

  void AddChunks(uint32_t micro, uint32_t tensor, const std::vector<float>& gradient,
                 std::vector<v1::TrainRequest>* requests) const {
    const size_t chunk = attached_.chunk_elements();
    for (size_t first = 0; first < gradient.size(); first += chunk) {
      const auto bytes = Bytes(gradient).subspan(first * sizeof(float), chunk * sizeof(float));
      v1::Gradient* message = requests->emplace_back().mutable_gradient();
      message->set_micro(micro);
      message->set_tensor(tensor);
      message->set_chunk(first / chunk);
      message->set_format("fp32");
      message->set_data(bytes.data(), bytes.size());
      message->set_crc32c(Crc32c(bytes));
    }
  }

  // None: the connection was lost first.
  std::optional<v1::StepResult> ReadResult(uint64_t step) {
    for (v1::TrainResponse response; stream_->Read(&response);) {
      if (response.has_step_result() && response.step_result().step() == step) return response.step_result();
      if (!response.has_weights()) continue;
      const v1::Weights& piece = response.weights();
      std::memcpy(&weights_[piece.tensor()][piece.chunk() * attached_.chunk_elements()], piece.data().data(),
                  piece.data().size());
    }
    return std::nullopt;
  }

  std::unique_ptr<v1::TrainerService::Stub> stub_;
  v1::AttachResponse attached_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace

std::unique_ptr<Rank> MakeForgetfulRank(const ChaosOptions& options, uint32_t rank) {
  return std::make_unique<ForgetfulRank>(options, rank);
}

}  // namespace ballast::chaos
