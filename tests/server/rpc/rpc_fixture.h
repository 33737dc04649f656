// A daemon in this process and a bare client of its stubs, with the helpers that speak the wire. They build and send;
// the tests assert.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/v1/admin.grpc.pb.h"
#include "ballast/v1/trainer.grpc.pb.h"
#include "kernels/registry.h"
#include "server/server.h"
#include "server/spec/run_spec.h"
#include "tests/server/rpc/reference.h"
#include "tests/server/rpc/wire.h"
#include "tests/server/specs.h"

namespace ballast::testing {

// Starts a server on the device that this executable tests: rpc_on_cpu.cc and rpc_on_gpu.cc each define it.
absl::StatusOr<std::unique_ptr<Server>> StartOnTestDevice(const Config& config, Metrics* metrics);

class RpcTest : public ::testing::Test {
 protected:
  // Small chunks, so that tensors have several.
  static Config DefaultConfig();
  void StartServer(const Config& config = DefaultConfig());
  void Connect(const Config& config, absl::StatusOr<std::unique_ptr<Server>> server);

  absl::StatusOr<v1::CreateRunResponse> CreateRun(const v1::RunSpec& spec, grpc::ClientContext* context = nullptr);
  grpc::Status Attach(v1::AttachRequest request, v1::AttachResponse* response, grpc::ClientContext* context = nullptr);
  v1::AttachResponse AttachFresh(const std::string& run_id, bool takeover = false, uint32_t rank = 0,
                                 uint32_t world = 1);
  v1::AttachResponse Resume(const std::string& run_id, const std::string& token, uint32_t rank = 0, uint32_t world = 1);
  // Has the call bring a token, where the daemon has an access file.
  static void Bring(const std::string& token, grpc::ClientContext* context) {
    context->AddMetadata("authorization", "Bearer " + token);
  }
  v1::RunStatus Status(const std::string& run_id);
  grpc::Status RewindTo(uint64_t step);  // of run r1

  static std::vector<float> Weights(const RunSpec& spec, uint32_t tensor);
  static std::string Gradient(const RunSpec& spec, uint32_t tensor, uint64_t step);
  static std::vector<v1::Gradient> Chunks(const RunSpec& spec, uint32_t tensor, const std::string& bytes);
  // Chunk `k` of the tensor's values, in fp32.
  static v1::LoadStateRequest LoadRequest(const RunSpec& spec, const std::string& token, uint32_t tensor, uint64_t k,
                                          const std::vector<float>& values);
  // Uploads Weights of every tensor as fp32.
  grpc::Status LoadAll(const RunSpec& spec, const std::string& token, v1::LoadStateResponse* response);

  // A rank of a run that was created and loaded, with its stream open.
  struct Trainer {
    RunSpec spec;
    std::string token;
    std::unique_ptr<Wire> wire;
    std::unique_ptr<Reference> reference;
  };
  Trainer StartTrainer(const v1::RunSpec& spec);
  void SendAll(const Trainer& trainer, uint32_t tensor, uint64_t step);
  grpc::Status Amend(const std::string& token, const v1::RunSpec& spec, v1::AmendRunResponse* response = nullptr);
  // Makes one whole step, here and in the reference; returns what came back.
  StepAnswer Step(Trainer* trainer, uint64_t step, std::optional<double> lr = std::nullopt);

  static bool Equal(const StepAnswer& answer, const Reference& reference, uint32_t tensor);
  // Steps [first, last], which are APPLIED and give the reference's weights.
  void ExpectSteps(Trainer* trainer, uint64_t first, uint64_t last);

  Config config_;
  Metrics metrics_{BuildInfo{}};
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::TrainerService::Stub> trainer_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

}  // namespace ballast::testing
