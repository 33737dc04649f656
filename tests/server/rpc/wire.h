// A rank's Train stream as a bare client sees it, and what comes back from a step. They send and read; the tests
// assert.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "ballast/v1/trainer.grpc.pb.h"
#include "client/cpp/transport/transport.h"

namespace ballast::testing {

// Opens the transport that this executable tests, for the session of `token`; nullptr: gRPC.
absl::StatusOr<std::unique_ptr<Transport>> OpenTestTransport(const std::string& token);

inline absl::Span<const std::byte> Bytes(const std::string& s) {
  return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}

// A rank's Train stream, call by call: over gRPC or, from Open on, over the transport that is tested.
class Wire {
 public:
  explicit Wire(v1::TrainerService::Stub* stub) : stub_(stub) {}
  ~Wire();

  bool Open(const std::string& token, const v1::Open& rest = {});  // waits for Opened
  bool Send(const v1::TrainRequest& request);
  // From now on messages wait; Release sends them as one batch.
  void Hold() { held_.emplace(); }
  bool Release();
  bool Begin(uint64_t step, std::optional<double> lr = std::nullopt);
  bool BeginMicro(uint32_t micro, bool last);
  bool Chunk(const v1::Gradient& gradient);
  bool EndMicro(uint32_t micro, const std::string& absent = "", std::optional<double> loss = std::nullopt);
  // Ends the step, and its last or only micro-batch.
  bool EndStep(const std::string& absent = "", std::optional<double> loss = std::nullopt, uint32_t micro = 0);
  std::optional<v1::TrainResponse> Read();  // batches: one by one
  // Reads on until weights come: a tensor is updated. False: the stream ended.
  bool AwaitWeights();
  // Of more than one message.
  uint64_t batches_read() const { return batches_read_; }
  // Reads everything the daemon still sends, ends the stream, and returns the daemon's status.
  grpc::Status Finish();
  grpc::Status Hang();  // cancels
  void CloseInput() { transport_ != nullptr ? transport_->WritesDone() : stream().WritesDone(); }

 private:
  grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>& stream();

  v1::TrainerService::Stub* const stub_;
  std::unique_ptr<Transport> transport_;
  absl::Status refused_;  // by the transport
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
  std::optional<v1::RequestBatch> held_;
  std::deque<v1::TrainResponse> batch_;  // read, not returned
  uint64_t batches_read_ = 0;
  bool finished_ = false;
};

// What came back from a step.
struct StepAnswer {
  std::map<uint32_t, std::string> weights;        // whole tensors, by index
  std::map<uint32_t, std::vector<float>> scales;  // as they came, chunk after chunk
  std::map<uint32_t, uint64_t> labels;            // step
  uint64_t credit = 0;
  bool checksums_right = true;
  uint64_t together = 0;             // tensors that came with others in one message
  uint64_t most_together_bytes = 0;  // of those messages
  std::optional<v1::StepResult> result;
};
StepAnswer ReadStep(Wire* wire);
void Take(const v1::Weights& weights, StepAnswer* answer);
void Take(const v1::SmallWeights& weights, StepAnswer* answer);

}  // namespace ballast::testing
