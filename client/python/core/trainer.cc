#include "client/python/core/trainer.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "proto/rewound.h"

#include "client/python/core/landing.h"
#include "client/python/core/memory.h"
#include "client/python/core/pending_measure.h"
#include "client/python/core/pending_step.h"
#include "client/python/core/push_queue.h"

namespace ballast {
namespace {

namespace nb = nanobind;

// --- the run ---------------------------------------------------------------------------------------------------------

// By tensor: begin, end, contributes; none: all of it.
using ShardTuples = std::optional<std::vector<std::optional<std::tuple<uint64_t, uint64_t, bool>>>>;

Shards MakeShards(const ShardTuples& tuples) {
  Shards shards;
  if (!tuples) return shards;
  for (const auto& tuple : *tuples) {
    auto& shard = shards.emplace_back();
    if (!tuple) continue;
    const auto [begin, end, contributes] = *tuple;
    shard = Shard{.begin = begin, .end = end, .contributes = contributes};
  }
  return shards;
}

nb::dict Attach(const PyClient& self, const std::string& run_id, uint32_t rank, uint32_t world, bool takeover,
                double wait_s, const std::string& transport, double join_timeout_s, const ShardTuples& shards,
                const std::string& spec_sha256, std::optional<int> gpu, uint64_t gradient_buffer_bytes) {
  const TransportChoice wish = transport == "grpc"   ? TransportChoice::kGrpc
                               : transport == "shm"  ? TransportChoice::kShm
                               : transport == "nccl" ? TransportChoice::kNccl
                                                     : TransportChoice::kAuto;
  AttachOptions options{.run_id = run_id, .rank = rank, .world = world, .takeover = takeover, .wait_s = wait_s};
  options.transport = wish;
  options.join_timeout_s = join_timeout_s;
  options.shards = MakeShards(shards);
  options.spec_sha256 = spec_sha256;
  options.gpu = gpu;
  options.gradient_buffer_bytes = gradient_buffer_bytes;
  const auto attach = [options](Client& client) {
    // What this process holds of an attachment whose answer Ctrl-C has kept from it is nothing. A rewind has ended its own, and
    // Attach is to know of it.
    if (!RewoundTo(client.status())) client.Detach();
    return client.Attach(options);
  };
  const Attachment attachment = OrThrow(self.AskOrUndo(attach, [](Client& client) { client.Detach(); }));
  self.Hold(run_id, options.shards);
  nb::dict out;
  out["resume_step"] = attachment.resume_step;
  out["weights_loaded"] = attachment.weights_loaded;
  out["generation"] = attachment.generation;
  out["digests"] = nb::cast(attachment.digests);
  out["client_state"] = nb::bytes(attachment.client_state.data(), attachment.client_state.size());
  out["client_state_step"] = attachment.client_state_step;
  out["last_result"] = attachment.last_result ? nb::object(ToDict(*attachment.last_result)) : nb::object(nb::none());
  return out;
}

uint64_t Step(const PyClient& self) { return self.Get()->step(); }

void CheckStatus(const PyClient& self) { OrThrow(self.Get()->status()); }

// --- weights ---------------------------------------------------------------------------------------------------------

using Slots = std::vector<std::tuple<uint32_t, std::string, std::string, Address, uint64_t>>;

std::vector<uint64_t> LoadWeights(const PyClient& self, const Slots& slots, const std::map<uint32_t, uint64_t>& updates,
                                  bool replace) {
  std::vector<TensorView> views;
  for (const auto& [tensor, slot, format, address, bytes] : slots) {
    views.push_back({.tensor = tensor, .format = format, .bytes = BytesAt(address, bytes), .slot = slot});
  }
  for (const auto& [tensor, count] : updates) {
    views.push_back({.tensor = tensor, .slot = "updates", .updates = count});
  }
  self.moved() = 0;
  const auto count = [&](uint64_t bytes) { self.moved() = bytes; };
  return UnlockedTransfer([&, client = self.Get()] { return client->LoadWeights(views, replace, count); });
}

// Returns the step that the pulled weights are of, by tensor. `digests`, by tensor: what is here already is left out.
std::map<uint32_t, uint64_t> Pull(const PyClient& self, const std::string& run_id, const Places& places,
                                  const std::map<uint32_t, uint64_t>& digests) {
  const Landing landing(places);
  self.moved() = 0;
  std::map<uint32_t, uint64_t> steps;
  const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t step) {
    steps[tensor] = step;
    self.moved() += piece.size();
    return landing.Write(tensor, offset, piece);
  };
  const std::vector<uint32_t> tensors = landing.tensors();
  std::vector<uint64_t> have;
  for (const uint32_t tensor : tensors) {
    if (!digests.empty()) have.push_back(digests.at(tensor));
  }
  if (!tensors.empty()) {
    const Shards shards = self.ShardsOf(run_id);
    UnlockedTransfer([&, client = self.Get()] { return client->Pull(run_id, tensors, sink, 0, have, shards); });
  }
  return steps;
}

// The same of weights as they are served, in formats of one byte.
std::map<uint32_t, uint64_t> PullServed(const PyClient& self, const std::string& run_id, const ServedPlaces& places) {
  const ServedLanding landing(places);
  self.moved() = 0;
  std::map<uint32_t, uint64_t> steps;
  const auto sink = [&](const ServedPiece& piece) {
    steps[piece.tensor] = piece.step;
    self.moved() += piece.codes.size();
    return landing.Write(piece);
  };
  if (const std::vector<uint32_t> tensors = landing.tensors(); !tensors.empty()) {
    UnlockedTransfer([&, client = self.Get()] { return client->PullServed(run_id, tensors, sink); });
  }
  return steps;
}

// (tensor, slot, address, bytes)
using StatePlaces = std::vector<std::tuple<uint32_t, std::string, Address, uint64_t>>;

// Returns how many updates the state is of, by tensor. All of a tensor is of one update; `snapshot` as Client::Pull's.
std::map<uint32_t, uint64_t> PullState(const PyClient& self, const std::string& run_id, const StatePlaces& places,
                                       uint64_t snapshot, std::optional<double> average) {
  std::map<std::string, Places> by_slot;
  for (const auto& [tensor, slot, address, bytes] : places) by_slot[slot].push_back({tensor, address, bytes});
  std::map<std::string, Landing> landings;
  std::vector<std::string> slots = {"updates"};
  std::vector<uint32_t> tensors;
  for (const auto& [slot, of_slot] : by_slot) {
    landings.emplace(slot, of_slot);
    slots.push_back(slot);
    for (const auto& place : of_slot) tensors.push_back(std::get<0>(place));
  }
  std::sort(tensors.begin(), tensors.end());
  tensors.erase(std::unique(tensors.begin(), tensors.end()), tensors.end());
  const Shards shards = self.ShardsOf(run_id);
  std::map<uint32_t, uint64_t> updates;
  const auto sink = [&](const ServedPiece& piece) -> absl::Status {
    if (piece.slot == "updates") {
      updates[piece.tensor] = piece.updates;
      return absl::OkStatus();
    }
    const auto landing = landings.find(piece.slot);
    if (landing == landings.end() || !landing->second.wants(piece.tensor)) return absl::OkStatus();
    const uint64_t first = piece.first - FirstHeld(shards, piece.tensor);
    return landing->second.Write(piece.tensor, first * sizeof(float), piece.codes);
  };
  if (tensors.empty()) return updates;
  UnlockedTransfer(
      [&, client = self.Get()] { return client->PullState(run_id, tensors, slots, sink, snapshot, shards, average); });
  return updates;
}

void BindWeights(const PyClient& self, uint32_t tensor, Address address, uint64_t bytes) {
  OrThrow(Unlocked(
      [&, client = self.Get()] { return client->BindWeights(tensor, reinterpret_cast<void*>(address), bytes); }));
}

void BindServed(const PyClient& self, uint32_t tensor, Address codes, uint64_t bytes, Address scales, uint64_t count) {
  const auto room = absl::MakeSpan(reinterpret_cast<float*>(scales), count);
  OrThrow(Unlocked(
      [&, client = self.Get()] { return client->BindServed(tensor, reinterpret_cast<void*>(codes), bytes, room); }));
}

bool AwaitWeights(const PyClient& self, uint32_t tensor, double timeout_s) {
  return OrThrow(Unlocked([&, client = self.Get()] { return client->AwaitWeights(tensor, timeout_s); }));
}

// --- a step ----------------------------------------------------------------------------------------------------------

// Each group's values by name.
using Groups = std::vector<std::map<std::string, double>>;

GroupValues MakeGroupValues(const std::map<std::string, double>& group) {
  GroupValues values;
  for (const auto& [name, value] : group) {
    std::optional<double>* field = name == "lr"             ? &values.lr
                                   : name == "weight_decay" ? &values.weight_decay
                                   : name == "beta1"        ? &values.beta1
                                   : name == "beta2"        ? &values.beta2
                                   : name == "momentum"     ? &values.momentum
                                                            : nullptr;
    if (field == nullptr) throw StatusError(absl::InvalidArgumentError("no step value is named '" + name + "'"));
    *field = value;
  }
  return values;
}

std::vector<GroupValues> MakeValues(const Groups& groups) {
  std::vector<GroupValues> values;
  for (const auto& group : groups) values.push_back(MakeGroupValues(group));
  return values;
}

void BeginStep(const PyClient& self, const Groups& groups, double loss_scale, uint32_t micro_batches) {
  const StepValues values{.groups = MakeValues(groups), .loss_scale = loss_scale, .micro_batches = micro_batches};
  OrThrow(Unlocked([&, client = self.Get()] { return client->BeginStep(values); }));
}

// Returns what a signal's handler has raised meanwhile, which ends a wait for the daemon: the gradient is pushed nevertheless.
nb::object Push(const PyClient& self, uint32_t tensor, Address address, uint64_t bytes) {
  const absl::Status pushed =
      Heeding([&, client = self.Get()] { return client->Push(tensor, BytesAt(address, bytes)); });
  nb::object raised = nb::none();
  if (PyErr_Occurred() != nullptr) raised = nb::borrow(nb::python_error().value());
  OrThrow(pushed);
  return raised;
}

PushQueue MakePushQueue(const PyClient& self) {
  PushQueue queue(self.Get());
  self.BeforeClose(queue.stop());
  return queue;
}

void EndMicro(const PyClient& self, std::optional<double> loss, bool next_is_last) {
  OrThrow(Unlocked([&, client = self.Get()] { return client->EndMicro(loss, next_is_last); }));
}

PendingMeasure MeasureStep(const PyClient& self, std::optional<double> loss) {
  PendingMeasure pending(Unlocked([&, client = self.Get()] { return client->MeasureStep(loss); }));
  pending.Wait(0);  // throws what refused the call: then the step goes on
  return pending;
}

PendingStep EndStep(const PyClient& self, std::optional<double> loss, nb::bytes client_state, const Groups& groups,
                    std::optional<double> max_grad_norm, bool discard, std::optional<double> gradient_flushed,
                    std::optional<double> gradient_overflowed) {
  const StepEndValues values{.client_state = std::string(client_state.c_str(), client_state.size()),
                             .groups = MakeValues(groups),
                             .max_grad_norm = max_grad_norm,
                             .discard = discard,
                             .gradient_flushed = gradient_flushed,
                             .gradient_overflowed = gradient_overflowed};
  PendingStep pending(Unlocked([&, client = self.Get()] { return client->EndStep(loss, values); }));
  pending.Wait(0);  // throws what refused the call: then the step goes on
  return pending;
}

}  // namespace

void BindTrainer(nb::class_<PyClient>& client) {
  using nb::arg;
  client
      .def("attach", &Attach, arg("run_id"), arg("rank"), arg("world"), arg("takeover"), arg("wait_s"),
           arg("transport") = "auto", arg("join_timeout_s") = AttachOptions().join_timeout_s,
           arg("shards").none() = nb::none(), arg("spec_sha256") = "", arg("gpu").none() = nb::none(),
           arg("gradient_buffer_bytes") = AttachOptions().gradient_buffer_bytes)
      .def_prop_ro("step", &Step)
      .def_prop_ro("shares_gpu", [](const PyClient& self) { return self.Get()->shares_gpu(); })
      .def("check_status", &CheckStatus)
      .def_prop_ro("moved", [](const PyClient& self) { return self.moved().load(); })
      .def("load_weights", &LoadWeights, arg("slots"), arg("updates") = std::map<uint32_t, uint64_t>(),
           arg("replace") = false)
      .def("pull_state", &PullState, arg("run_id"), arg("places"), arg("snapshot") = 0,
           arg("average").none() = nb::none())
      .def("pull", &Pull, arg("run_id"), arg("places"), arg("digests") = std::map<uint32_t, uint64_t>())
      .def("bind_weights", &BindWeights, arg("tensor"), arg("address"), arg("nbytes"))
      .def("pull_served", &PullServed, arg("run_id"), arg("places"))
      .def("bind_served", &BindServed, arg("tensor"), arg("codes"), arg("nbytes"), arg("scales"), arg("count"))
      .def("await_weights", &AwaitWeights, arg("tensor"), arg("timeout_s"))
      .def("begin_step", &BeginStep, arg("groups"), arg("loss_scale") = 1.0, arg("micro_batches") = 1)
      .def("push", &Push, arg("tensor"), arg("address"), arg("nbytes"))
      .def("push_queue", &MakePushQueue)
      .def("end_micro", &EndMicro, arg("loss").none(), arg("next_is_last") = false)
      .def("measure_step", &MeasureStep, arg("loss").none() = nb::none())
      .def("end_step", &EndStep, arg("loss").none(), arg("client_state") = nb::bytes("", 0), arg("groups") = Groups(),
           arg("max_grad_norm").none() = nb::none(), arg("discard") = false,
           arg("gradient_flushed").none() = nb::none(), arg("gradient_overflowed").none() = nb::none());
}

}  // namespace ballast
