#include "tests/server/rpc/rpc_fixture.h"

#include <cstring>
#include <numeric>
#include <random>

#include "proto/checksum.h"

#include "kernels/matrix/newton_schulz.h"
#include "server/convert/convert.h"
#include "server/plan/plan.h"
#include "server/spec/carry_over.h"
#include "server/store/parameter_store.h"

namespace ballast::testing {
namespace {

constexpr kernels::PlaneKind kKinds[] = {kernels::PlaneKind::kWeights, kernels::PlaneKind::kMomentum,
                                         kernels::PlaneKind::kVariance};

void Orthogonalize(const kernels::Update& u, double squares) {
  std::vector<float> room(kernels::OrthogonalizingRoom(u.rows, u.n / u.rows));
  kernels::OrthogonalizeMatrix(kernels::FastestProduct(), u.rows, u.n / u.rows, squares, u.least_norm, u.direction,
                               room.data(), kernels::WorkAlone);
}

}  // namespace

Reference::Reference(const RunSpec& spec) : spec_(spec), tensors_(spec.tensors.size()) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (const kernels::Plane& plane : spec_.groups[spec_.tensors[i].group].kernel->planes) {
      auto& storage =
          tensors_[i].storage.emplace_back(AlignedPlaneBytes(plane, spec_.tensors[i].elements) + kAlignment);
      void* at = storage.data();
      size_t space = storage.size();
      auto* aligned = static_cast<std::byte*>(std::align(kAlignment, space - kAlignment, at, space));
      tensors_[i].planes.push_back(aligned);
      if (plane.kind == kernels::PlaneKind::kWeights) tensors_[i].master_planes.push_back(aligned);
    }
  }
}

void Reference::TakeOver(Reference* past) {
  for (uint32_t i = 0; i < past->tensors_.size(); ++i) {
    const kernels::Kernel &from = *past->spec_.groups[past->spec_.tensors[i].group].kernel,
                          &to = *spec_.groups[spec_.tensors[i].group].kernel;
    const bool same_master = std::string(from.master) == to.master, same_state = std::string(from.state) == to.state;
    if (same_master && same_state) {
      tensors_[i] = std::move(past->tensors_[i]);
      continue;
    }
    tensors_[i].t = past->tensors_[i].t;
    for (const auto kind : kKinds) {
      if (kind == kernels::PlaneKind::kWeights ? same_master : same_state) {
        CopyPlanes(*past, i, kind);
      } else if (kind == kernels::PlaneKind::kWeights) {
        Load(i, past->Master(i));
      } else if (StateCodec(from, kind) != nullptr) {
        LoadState(i, kind, past->State(i, kind));
      }
    }
  }
}

void Reference::CopyPlanes(const Reference& past, uint32_t tensor, kernels::PlaneKind kind) {
  const std::vector<std::byte*> from = past.PlanesOf(tensor, kind), to = PlanesOf(tensor, kind);
  size_t next = 0;
  for (const kernels::Plane& plane : spec_.groups[spec_.tensors[tensor].group].kernel->planes) {
    if (plane.kind != kind) continue;
    std::memcpy(to[next], from[next], kernels::PlaneBytes(plane, spec_.tensors[tensor].elements));
    ++next;
  }
}

void Reference::Load(uint32_t tensor, const std::vector<float>& weights) {
  const kernels::MasterFormat* master = spec_.groups[spec_.tensors[tensor].group].master;
  master->load(tensors_[tensor].master_planes.data(), kernels::FindWireFormat("fp32"), weights.data(), 0,
               weights.size());
}

void Reference::Update(uint32_t tensor, uint64_t step, const std::string& gradient, std::optional<double> lr) {
  UpdateBy(tensor, step, {.data = gradient.data(), .format = spec_.tensors[tensor].gradient_format}, lr);
}

void Reference::UpdateBySum(uint32_t tensor, uint64_t step, const std::vector<float>& sum, float scale, float clip,
                            std::optional<double> lr) {
  const kernels::WireIndex fp32 = kernels::FindWireFormat("fp32");
  UpdateBy(tensor, step, {.data = sum.data(), .format = fp32, .scale = scale, .clip = clip}, lr);
}

void Reference::UpdateBy(uint32_t tensor, uint64_t step, const Payload& gradient, std::optional<double> lr) {
  const TensorSpec& spec = spec_.tensors[tensor];
  const GroupSpec& group = spec_.groups[spec.group];
  Tensor& t = tensors_[tensor];
  kernels::Update update = {};
  for (size_t p = 0; p < t.planes.size(); ++p) update.planes[p] = t.planes[p];
  update.grad = gradient.data;
  update.grad_format = gradient.format;
  update.n = spec.elements;
  update.grad_scale = gradient.scale;
  update.clip = gradient.clip;
  update.random_key = kernels::RandomKey(NameKey(spec.name, spec_.seed), step);
  update.stochastic = group.stochastic;
  update.statistics = kernels::StatisticsLevel::kFull;
  std::vector<double> hyper = group.hyper;
  if (lr) hyper[0] = *lr;
  for (size_t h = 0; h < hyper.size(); ++h) {
    const kernels::ScaledBy by = group.kernel->hypers[h].scaled_by;
    if (by == kernels::ScaledBy::kLrScale) hyper[h] *= spec.lr_scale;
    if (by == kernels::ScaledBy::kWdScale) hyper[h] *= spec.wd_scale;
  }
  group.kernel->prepare(hyper, ++t.t, update.constants);
  std::vector<float> direction(kernels::PaddedElements(spec.elements));
  if (group.kernel->fit != nullptr) {
    update.direction = direction.data();
    update.rows = MatrixRows(spec);
    update.least_norm = group.kernel->fit(update.rows, update.n / update.rows, update.constants);
  }
  std::vector<kernels::TileStatistics> tiles((spec.elements + kernels::kTile - 1) / kernels::kTile);
  if (group.kernel->measure != nullptr) {
    std::vector<float> sums(tiles.size());
    group.kernel->measure(update, 0, tiles.size(), sums.data());
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (group.kernel->finish != nullptr) group.kernel->finish(sum, spec.elements, update.constants);
    if (group.kernel->fit != nullptr) Orthogonalize(update, sum);
  }
  group.kernel->update(update, 0, tiles.size(), tiles.data());
  t.statistics = kernels::Combine(tiles, true);
}

std::string Reference::EncodeWeights(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  std::string out(ServingBytes(spec), '\0');
  const std::vector<float> scales = Scales(tensor);
  spec_.groups[spec.group].master->encode_weights(tensors_[tensor].master_planes.data(), spec.serving_format,
                                                  scales.data(), spec.row_length, out.data(), 0, spec.elements);
  return out;
}

std::vector<std::byte*> Reference::PlanesOf(uint32_t tensor, kernels::PlaneKind kind) const {
  std::vector<std::byte*> planes;
  const auto all = spec_.groups[spec_.tensors[tensor].group].kernel->planes;
  for (size_t p = 0; p < all.size(); ++p) {
    if (all[p].kind == kind) planes.push_back(tensors_[tensor].planes[p]);
  }
  return planes;
}

std::vector<float> Reference::Master(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  std::vector<float> values(spec.elements);
  spec_.groups[spec.group].master->encode_weights(tensors_[tensor].master_planes.data(),
                                                  kernels::FindWireFormat("fp32"), nullptr, 0, values.data(), 0,
                                                  spec.elements);
  return values;
}

std::vector<float> Reference::State(uint32_t tensor, kernels::PlaneKind kind) const {
  std::vector<float> values(spec_.tensors[tensor].elements);
  StateCodec(spec_, tensor, kind)->decode(PlanesOf(tensor, kind).data(), values.data(), values.size());
  return values;
}

void Reference::LoadState(uint32_t tensor, kernels::PlaneKind kind, const std::vector<float>& values) {
  EXPECT_TRUE(StateCodec(spec_, tensor, kind)
                  ->encode(PlanesOf(tensor, kind).data(), values.data(), values.size(), /*random_key=*/0,
                           /*stochastic=*/false));
}

std::vector<float> Reference::Scales(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  std::vector<float> scales;
  for (uint64_t first = 0; spec.row_length > 0 && first < spec.elements; first += spec.row_length) {
    scales.push_back(
        spec_.groups[spec.group].master->absmax(tensors_[tensor].master_planes.data(), first, first + spec.row_length));
  }
  return scales;
}

std::vector<float> Reference::ScalesOfChunks(uint32_t tensor) const {
  const TensorSpec& spec = spec_.tensors[tensor];
  const std::vector<float> scales = Scales(tensor);
  std::vector<float> sent;
  for (uint64_t k = 0; k < ChunkCount(spec_, spec); ++k) {
    const ScaleRange range = ScalesOf(spec, ChunkBegin(spec_, k), ChunkEnd(spec_, spec, k));
    for (uint64_t i = range.first; i < range.last; ++i) sent.push_back(scales[i]);
  }
  return sent;
}

uint64_t Reference::Digest(uint32_t tensor) const {
  const std::vector<float> scales = Scales(tensor);
  const uint64_t codes = WeightDigest(Bytes(EncodeWeights(tensor)));
  if (scales.empty()) return codes;
  const uint64_t both[] = {
      codes, WeightDigest({reinterpret_cast<const std::byte*>(scales.data()), scales.size() * sizeof(float)})};
  return WeightDigest({reinterpret_cast<const std::byte*>(both), sizeof both});
}

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

absl::StatusOr<v1::CreateRunResponse> RpcTest::CreateRun(const v1::RunSpec& spec) {
  grpc::ClientContext context;
  v1::CreateRunRequest request;
  *request.mutable_spec() = spec;
  v1::CreateRunResponse response;
  const grpc::Status s = trainer_->CreateRun(&context, request, &response);
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
  std::mt19937 random(tensor + 1);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> weights(spec.tensors[tensor].elements);
  for (float& w : weights) w = normal(random);
  return weights;
}

std::string RpcTest::Gradient(const RunSpec& spec, uint32_t tensor, uint64_t step) {
  std::mt19937_64 random(step * 1000 + tensor);
  std::normal_distribution<float> normal(0, 0.01f);
  const uint64_t bytes = WireBytes(spec.tensors[tensor].gradient_format);
  std::string gradient;
  for (uint64_t i = 0; i < spec.tensors[tensor].elements; ++i) {
    const float x = normal(random);
    char raw[4];
    std::memcpy(raw, &x, 4);
    gradient.append(raw + 4 - bytes, bytes);  // bf16: the upper half
  }
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

bool RpcTest::Equal(const StepAnswer& answer, const Reference& reference, uint32_t tensor) {
  const auto got = answer.weights.find(tensor);
  return got != answer.weights.end() && got->second == reference.EncodeWeights(tensor) &&
         answer.scales.at(tensor) == reference.ScalesOfChunks(tensor);
}

}  // namespace ballast::testing
