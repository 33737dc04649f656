// Runs that are given another spec in the middle: helpers for tests that train with a team before and after it.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/rewound.h"

#include "tests/server/rpc/team_fixture.h"

namespace ballast::testing {

class AmendRpcTest : public TeamRpcTest {
 protected:
  static constexpr uint32_t kKept = 2;  // tensors of Spec

  static v1::RunSpec Spec(const std::string& run_id = "r1") {
    return MakeSpec(run_id, {{"layers.0.w", {90, 100}, "fp32"}, {"layers.0.b", {5}, "fp32"}});
  }
  static void AddTensor(v1::RunSpec* spec, const std::string& name, std::initializer_list<int64_t> shape,
                        uint32_t group) {
    v1::TensorSpec* t = spec->add_tensors();
    t->set_name(name);
    t->mutable_shape()->Add(shape.begin(), shape.end());
    t->set_dtype("fp32");
    t->set_group(group);
  }
  // With a layer more, in a group of its own, and one tensor more of an old layer.
  static v1::RunSpec Grown(v1::RunSpec spec) {
    v1::GroupSpec* group = spec.add_groups();
    group->set_rule("sgd");
    (*group->mutable_hyper())["momentum"] = 0.9;
    AddTensor(&spec, "layers.1.w", {70, 80}, 1);
    AddTensor(&spec, "layers.0.c", {33}, 0);
    return spec;
  }

  // Weights of the tensors from `first` on.
  grpc::Status LoadAdded(const RunSpec& spec, const std::string& token, uint32_t first, bool replace = true) {
    grpc::ClientContext context;
    v1::LoadStateResponse response;
    const auto writer = trainer_->LoadState(&context, &response);
    for (uint32_t i = first; i < spec.tensors.size(); ++i) {
      const std::vector<float> weights = Weights(spec, i);
      for (uint64_t k = 0; k < ChunkCount(spec, spec.tensors[i]); ++k) {
        v1::LoadStateRequest request = LoadRequest(spec, token, i, k, weights);
        request.set_replace(replace);
        writer->Write(request);
      }
    }
    writer->WritesDone();
    return writer->Finish();
  }
  static void ExpectRewound(Wire* wire, uint64_t step) {
    const grpc::Status s = wire->Finish();
    EXPECT_EQ(RewoundTo(absl::Status(static_cast<absl::StatusCode>(s.error_code()), s.error_message())), step)
        << s.error_message();
  }
  void Attach(Team* team) {
    const auto world = static_cast<uint32_t>(team->wires.size());
    for (uint32_t rank = 0; rank < world; ++rank) {
      team->tokens[rank] = AttachFresh(team->spec.run_id, /*takeover=*/true, rank, world).session_token();
    }
  }
  void OpenStreams(Team* team) {
    for (uint32_t rank = 0; rank < team->wires.size(); ++rank) {
      team->wires[rank] = std::make_unique<Wire>(trainer_.get());
      EXPECT_TRUE(team->wires[rank]->Open(team->tokens[rank]));
    }
  }
  // The team trains the amended run from here on.
  void Follow(Team* team, const v1::RunSpec& wire_spec) {
    const auto kept = static_cast<uint32_t>(team->spec.tensors.size());
    team->spec = ToRunSpec(wire_spec, config_.limits).value();
    auto reference = std::make_unique<Reference>(team->spec);
    reference->TakeOver(team->reference.get());
    team->reference = std::move(reference);
    Attach(team);
    const auto tensors = static_cast<uint32_t>(team->spec.tensors.size());
    if (kept < tensors) {
      const grpc::Status loaded = LoadAdded(team->spec, team->tokens[0], kept);
      ASSERT_TRUE(loaded.ok()) << loaded.error_message();
      for (uint32_t i = kept; i < tensors; ++i) team->reference->Load(i, Weights(team->spec, i));
      Attach(team);
    }
    OpenStreams(team);
  }
  v1::RunSpec ForWorld(v1::RunSpec spec, uint32_t world) {
    spec.set_ranks(world);
    return spec;
  }
  // What a pull of these tensors brings of every slot, by tensor and slot.
  std::map<std::pair<uint32_t, std::string>, std::string> Stored(const std::string& run_id, uint32_t tensors) {
    grpc::ClientContext context;
    v1::PullRequest request;
    request.set_run_id(run_id);
    for (uint32_t i = 0; i < tensors; ++i) request.add_tensors(i);
    for (const char* slot : {"master", "momentum", "variance", "updates"}) request.add_slots(slot);
    const auto reader = trainer_->Pull(&context, request);
    std::map<std::pair<uint32_t, std::string>, std::string> stored;
    for (v1::Weights w; reader->Read(&w);) {
      stored[{w.tensor(), w.slot()}] += w.slot() == "updates" ? std::to_string(w.updates()) : w.data();
    }
    const grpc::Status s = reader->Finish();
    EXPECT_TRUE(s.ok()) << s.error_message();
    return stored;
  }
  void StartAnew(Team* team) {
    team->wires.clear();
    server_.reset();
    StartServer();
  }
};

}  // namespace ballast::testing
