#include "tests/server/rpc/team_fixture.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "server/convert/convert.h"

namespace ballast::testing {
namespace {

struct Piece {
  uint32_t rank = 0;
  v1::Gradient chunk;
};

}  // namespace

v1::RunSpec TeamRpcTest::StagedSpec(const std::string& run_id) {
  v1::RunSpec spec = SmallSpec();
  spec.set_run_id(run_id);
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  return spec;
}

TeamRpcTest::Team TeamRpcTest::StartTeam(v1::RunSpec wire_spec, uint32_t world) {
  wire_spec.set_ranks(std::max(wire_spec.ranks(), world));
  const auto created = CreateRun(wire_spec);
  EXPECT_TRUE(created.ok()) << created.status();
  Team team{.spec = ToRunSpec(wire_spec, config_.limits, config_.storage.on()).value()};
  team.reference = std::make_unique<Reference>(team.spec);
  for (uint32_t rank = 0; rank < world; ++rank) {
    team.tokens.push_back(AttachFresh(team.spec.run_id, false, rank, world).session_token());
  }
  v1::LoadStateResponse loaded;
  EXPECT_TRUE(LoadAll(team.spec, team.tokens[0], &loaded).ok());
  for (uint32_t i = 0; i < team.spec.tensors.size(); ++i) team.reference->Load(i, Weights(team.spec, i));
  grpc::ChannelArguments connections;
  connections.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // none is shared
  for (uint32_t rank = 0; rank < world; ++rank) {
    team.stubs.push_back(v1::TrainerService::NewStub(
        grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), connections)));
    team.wires.push_back(std::make_unique<Wire>(team.stubs.back().get()));
    EXPECT_TRUE(team.wires.back()->Open(team.tokens[rank]));
  }
  return team;
}

std::string TeamRpcTest::GradientOf(const Team& team, uint32_t tensor, uint64_t step, uint32_t rank, uint32_t micro) {
  std::string gradient = Gradient(team.spec, tensor, step * 1000 + rank * 16 + micro);
  if (rank != 0 || micro != 0 || !team.poisoned.contains({step, tensor})) return gradient;
  const float infinity = std::numeric_limits<float>::infinity();
  const uint64_t bytes = WireBytes(team.spec.tensors[tensor].gradient_format);  // bf16: the upper half
  std::memcpy(gradient.data(), reinterpret_cast<const char*>(&infinity) + 4 - bytes, bytes);
  return gradient;
}

std::vector<float> TeamRpcTest::Sum(const RunSpec& spec, uint32_t tensor, const std::vector<std::string>& gradients) {
  const uint64_t bytes = WireBytes(spec.tensors[tensor].gradient_format);
  std::vector<float> sum(spec.tensors[tensor].elements);
  for (size_t g = 0; g < gradients.size(); ++g) {
    for (size_t i = 0; i < sum.size(); ++i) {
      uint32_t word = 0;  // fp32, or bf16 as its upper half
      std::memcpy(reinterpret_cast<char*>(&word) + 4 - bytes, gradients[g].data() + i * bytes, bytes);
      const float x = std::bit_cast<float>(word);
      sum[i] = g == 0 ? x : sum[i] + x;
    }
  }
  return sum;
}

std::vector<float> TeamRpcTest::SumOf(const Team& team, uint32_t tensor, uint64_t step, uint32_t micros) {
  std::vector<std::string> gradients;
  for (uint32_t micro = 0; micro < micros; ++micro) {
    for (uint32_t rank = 0; rank < team.wires.size(); ++rank) {
      gradients.push_back(GradientOf(team, tensor, step, rank, micro));
    }
  }
  return Sum(team.spec, tensor, gradients);
}

double TeamRpcTest::ExactNorm(const Team& team, uint64_t step, uint32_t micros, float scale) {
  const auto measure = kernels::WireFormats()[static_cast<size_t>(kernels::FindWireFormat("fp32"))].measure;
  double sum = 0;
  for (uint32_t i = 0; i < team.spec.tensors.size(); ++i) {
    const std::vector<float> gradient = SumOf(team, i, step, micros);
    std::vector<kernels::TileStatistics> tiles((gradient.size() + kernels::kTile - 1) / kernels::kTile);
    measure(gradient.data(), gradient.size(), scale, 0, tiles.size(), tiles.data());
    sum += kernels::Combine(tiles, false).grad_sq;
  }
  return std::sqrt(sum);
}

void TeamRpcTest::SendMicro(Team* team, uint64_t step, uint32_t micro, std::mt19937* random) {
  std::vector<Piece> pieces;
  for (uint32_t rank = 0; rank < team->wires.size(); ++rank) {
    for (uint32_t i = 0; i < team->spec.tensors.size(); ++i) {
      for (v1::Gradient& chunk : Chunks(team->spec, i, GradientOf(*team, i, step, rank, micro))) {
        chunk.set_micro(micro);
        pieces.push_back({rank, std::move(chunk)});
      }
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), *random);
  for (const Piece& piece : pieces) team->wires[piece.rank]->Chunk(piece.chunk);
}

void TeamRpcTest::SendStep(Team* team, uint64_t step, const StepShape& shape) {
  std::mt19937 random(static_cast<uint32_t>(step) + shape.shuffle);
  v1::TrainRequest begin, end;
  begin.mutable_step_begin()->set_step(step);
  if (shape.loss_scale) begin.mutable_step_begin()->set_loss_scale(*shape.loss_scale);
  end.mutable_step_end();
  if (shape.end_lr) end.mutable_step_end()->add_groups()->set_lr(*shape.end_lr);
  for (const auto& wire : team->wires) wire->Send(begin);
  for (uint32_t micro = 0; micro < shape.micros; ++micro) {
    const bool last = micro + 1 == shape.micros;
    for (const auto& wire : team->wires) wire->BeginMicro(micro, last && !shape.open_ended);
    SendMicro(team, step, micro, &random);
    for (const auto& wire : team->wires) wire->EndMicro(micro, "", last ? 1.5 : 0.5);
  }
  for (const auto& wire : team->wires) {
    if (shape.ends) wire->Send(end);
  }
}

void TeamRpcTest::UpdateReference(Team* team, uint64_t step, uint32_t micros, float scale, float clip) {
  for (uint32_t i = 0; i < team->spec.tensors.size(); ++i) {
    team->reference->UpdateBySum(i, step, SumOf(*team, i, step, micros), scale, clip);
  }
}

StepAnswer TeamRpcTest::ExpectApplied(Team* team) {
  StepAnswer first;
  for (uint32_t rank = 0; rank < team->wires.size(); ++rank) {
    StepAnswer answer = ReadStep(team->wires[rank].get());
    if (!answer.result) {
      ADD_FAILURE() << team->wires[rank]->Finish().error_message();
      return {};
    }
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED) << answer.result->detail();
    EXPECT_TRUE(answer.checksums_right);
    for (uint32_t i = 0; i < team->spec.tensors.size(); ++i) {
      EXPECT_TRUE(Equal(answer, *team->reference, i))
          << "rank " << rank << ", tensor " << i << ", step " << answer.result->step();
    }
    if (rank == 0) first = std::move(answer);
  }
  return first;
}

void TeamRpcTest::ExpectStep(Team* team, uint64_t step, uint32_t micros, float scale) {
  SendStep(team, step, {.micros = micros});
  UpdateReference(team, step, micros, scale);
  ExpectApplied(team);
}

}  // namespace ballast::testing
