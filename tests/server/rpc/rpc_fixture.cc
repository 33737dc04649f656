#include "tests/server/rpc/rpc_fixture.h"

#include <cstring>

#include "proto/checksum.h"

#include "server/convert/convert.h"
#include "tests/normals.h"

namespace ballast::testing {

Config RpcTest::DefaultConfig() {
  Config config;
  config.listen = "127.0.0.1:0";
  config.device = "cpu";
  config.threads = 2;
  config.memory_limit = 1 << 30;
  config.limits.chunk_bytes = 16384;  // 4096 elements
  return config;
}

void RpcTest::StartServer(const Config& config) { Connect(config, StartOnTestDevice(config, &metrics_)); }

void RpcTest::Connect(const Config& config, absl::StatusOr<std::unique_ptr<Server>> server) {
  config_ = config;
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  // A stream holds 64 KiB that were not read, whatever the link seems to bear: tests have readers that stand still.
  grpc::ChannelArguments windows;
  windows.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  channel_ = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), windows);
  trainer_ = v1::TrainerService::NewStub(channel_);
  admin_ = v1::AdminService::NewStub(channel_);
}

absl::StatusOr<v1::CreateRunResponse> RpcTest::CreateRun(const v1::RunSpec& spec, grpc::ClientContext* context) {
  grpc::ClientContext own;
  v1::CreateRunRequest request;
  *request.mutable_spec() = spec;
  v1::CreateRunResponse response;
  const grpc::Status s = trainer_->CreateRun(context != nullptr ? context : &own, request, &response);
  if (!s.ok()) return absl::Status(static_cast<absl::StatusCode>(s.error_code()), s.error_message());
  return response;
}

grpc::Status RpcTest::Attach(v1::AttachRequest request, v1::AttachResponse* response, grpc::ClientContext* context) {
  grpc::ClientContext own;
  if (request.world() == 0) request.set_world(1);
  if (request.protocol_max() == 0) {
    request.set_protocol_min(1);
    request.set_protocol_max(1);
  }
  return trainer_->Attach(context != nullptr ? context : &own, request, response);
}

v1::AttachResponse RpcTest::AttachFresh(const std::string& run_id, bool takeover, uint32_t rank, uint32_t world) {
  v1::AttachRequest request;
  request.set_run_id(run_id);
  request.set_rank(rank);
  request.set_world(world);
  request.set_takeover(takeover);
  v1::AttachResponse response;
  const grpc::Status s = Attach(request, &response);
  EXPECT_TRUE(s.ok()) << s.error_message();
  return response;
}

v1::AttachResponse RpcTest::Resume(const std::string& run_id, const std::string& token, uint32_t rank, uint32_t world) {
  v1::AttachRequest request;
  request.set_run_id(run_id);
  request.set_rank(rank);
  request.set_world(world);
  request.set_session_token(token);
  v1::AttachResponse response;
  const grpc::Status s = Attach(request, &response);
  EXPECT_TRUE(s.ok()) << s.error_message();
  return response;
}

grpc::Status RpcTest::RewindTo(uint64_t step) {
  grpc::ClientContext context;
  v1::RewindRequest request;
  request.set_run_id("r1");
  request.set_to_step(step);
  v1::RewindResponse response;
  return admin_->Rewind(&context, request, &response);
}

v1::RunStatus RpcTest::Status(const std::string& run_id) {
  grpc::ClientContext context;
  v1::GetRunRequest request;
  request.set_run_id(run_id);
  v1::GetRunResponse response;
  const grpc::Status s = admin_->GetRun(&context, request, &response);
  EXPECT_TRUE(s.ok()) << s.error_message();
  return response.status();
}

std::vector<float> RpcTest::Weights(const RunSpec& spec, uint32_t tensor) {
  return NormalValues(tensor + 1, 0.05f, spec.tensors[tensor].elements);
}

std::string RpcTest::Gradient(const RunSpec& spec, uint32_t tensor, uint64_t step) {
  const std::vector<float> values = NormalValues(step * 1000 + tensor, 0.01f, spec.tensors[tensor].elements);
  const uint64_t bytes = WireBytes(spec.tensors[tensor].gradient_format);
  const char* from = reinterpret_cast<const char*>(values.data()) + sizeof(float) - bytes;  // bf16: the upper half
  std::string gradient(values.size() * bytes, '\0');
  for (size_t i = 0; i < values.size(); ++i) std::memcpy(&gradient[i * bytes], from + i * sizeof(float), bytes);
  return gradient;
}

std::vector<v1::Gradient> RpcTest::Chunks(const RunSpec& spec, uint32_t tensor, const std::string& bytes) {
  const TensorSpec& t = spec.tensors[tensor];
  const uint64_t width = WireBytes(t.gradient_format);
  std::vector<v1::Gradient> chunks;
  for (uint64_t k = 0; k < ChunkCount(spec, t); ++k) {
    v1::Gradient& g = chunks.emplace_back();
    g.set_tensor(tensor);
    g.set_chunk(k);
    g.set_format(kernels::WireFormats()[static_cast<size_t>(t.gradient_format)].name);
    g.set_data(bytes.substr(ChunkBegin(spec, k) * width, (ChunkEnd(spec, t, k) - ChunkBegin(spec, k)) * width));
    g.set_crc32c(Crc32c(Bytes(g.data())));
  }
  return chunks;
}

v1::LoadStateRequest RpcTest::LoadRequest(const RunSpec& spec, const std::string& token, uint32_t tensor, uint64_t k,
                                          const std::vector<float>& values) {
  const uint64_t begin = ChunkBegin(spec, k), end = ChunkEnd(spec, spec.tensors[tensor], k);
  v1::LoadStateRequest request;
  request.set_session_token(token);
  request.set_tensor(tensor);
  request.set_chunk(k);
  request.set_format("fp32");
  request.set_data(values.data() + begin, (end - begin) * 4);
  request.set_crc32c(Crc32c(Bytes(request.data())));
  return request;
}

grpc::Status RpcTest::LoadAll(const RunSpec& spec, const std::string& token, v1::LoadStateResponse* response) {
  grpc::ClientContext context;
  const auto writer = trainer_->LoadState(&context, response);
  for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
    const std::vector<float> weights = Weights(spec, i);
    for (uint64_t k = 0; k < ChunkCount(spec, spec.tensors[i]); ++k) {
      if (!writer->Write(LoadRequest(spec, token, i, k, weights))) return writer->Finish();
    }
  }
  writer->WritesDone();
  return writer->Finish();
}

grpc::Status RpcTest::Amend(const std::string& token, const v1::RunSpec& spec, v1::AmendRunResponse* response) {
  grpc::ClientContext context;
  v1::AmendRunRequest request;
  request.set_session_token(token);
  *request.mutable_spec() = spec;
  v1::AmendRunResponse own;
  return trainer_->AmendRun(&context, request, response == nullptr ? &own : response);
}

RpcTest::Trainer RpcTest::StartTrainer(const v1::RunSpec& wire_spec) {
  const auto created = CreateRun(wire_spec);
  EXPECT_TRUE(created.ok()) << created.status();
  Trainer t;
  t.spec = ToRunSpec(wire_spec, config_.limits).value();
  t.token = AttachFresh(t.spec.run_id).session_token();
  v1::LoadStateResponse loaded;
  const grpc::Status s = LoadAll(t.spec, t.token, &loaded);
  EXPECT_TRUE(s.ok()) << s.error_message();
  t.reference = std::make_unique<Reference>(t.spec);
  for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) t.reference->Load(i, Weights(t.spec, i));
  t.wire = std::make_unique<Wire>(trainer_.get());
  EXPECT_TRUE(t.wire->Open(t.token));
  return t;
}

void RpcTest::SendAll(const Trainer& trainer, uint32_t tensor, uint64_t step) {
  for (const v1::Gradient& chunk : Chunks(trainer.spec, tensor, Gradient(trainer.spec, tensor, step))) {
    trainer.wire->Chunk(chunk);
  }
}

StepAnswer RpcTest::Step(Trainer* trainer, uint64_t step, std::optional<double> lr) {
  trainer->wire->Begin(step, lr);
  for (uint32_t i = static_cast<uint32_t>(trainer->spec.tensors.size()); i-- > 0;) {
    SendAll(*trainer, i, step);
    trainer->reference->Update(i, step, Gradient(trainer->spec, i, step), lr);
  }
  trainer->wire->EndStep("", 1.5);
  return ReadStep(trainer->wire.get());
}

void RpcTest::ExpectSteps(Trainer* trainer, uint64_t first, uint64_t last) {
  for (uint64_t step = first; step <= last; ++step) {
    const StepAnswer answer = Step(trainer, step);
    ASSERT_TRUE(answer.result) << trainer->wire->Finish().error_message();
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
    for (uint32_t i = 0; i < trainer->spec.tensors.size(); ++i) {
      ASSERT_TRUE(Equal(answer, *trainer->reference, i)) << "tensor " << i << ", step " << step;
    }
  }
}

bool RpcTest::Equal(const StepAnswer& answer, const Reference& reference, uint32_t tensor) {
  const auto got = answer.weights.find(tensor);
  return got != answer.weights.end() && got->second == reference.EncodeWeights(tensor) &&
         answer.scales.at(tensor) == reference.ScalesOfChunks(tensor);
}

}  // namespace ballast::testing
