// ballast._core: ballast::Client for Python, one method each. Memory is given as (address, bytes) and stays the
// caller's. A spec comes as Protobuf's JSON; answers go as dictionaries.

#include <google/protobuf/util/json_util.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "client/cpp/client.h"
#include "client/python/core/interruptible.h"
#include "client/python/core/message.h"
#include "client/python/core/numerics.h"
#include "client/python/core/numerics_digest.h"
#include "client/python/core/status_error.h"

namespace ballast {
namespace {

namespace nb = nanobind;
namespace json = google::protobuf::util;

using Address = uintptr_t;

v1::RunSpec ParseSpec(const std::string& text) {
  v1::RunSpec spec;
  const auto status = json::JsonStringToMessage(text, &spec);
  if (!status.ok()) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat("the run's spec: ", std::string(status.message()))));
  }
  return spec;
}

absl::Span<const std::byte> Bytes(Address address, uint64_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

// The fields of v1::StepResult, "timing", and "tensors_received".
nb::dict DescribeStep(const StepResult& result) {
  nb::dict timing;
  timing["pushed_bytes"] = result.timing.pushed_bytes;
  timing["pulled_bytes"] = result.timing.pulled_bytes;
  timing["pushed_bytes_in_backward"] = result.timing.pushed_bytes_in_backward;
  timing["pulled_bytes_in_backward"] = result.timing.pulled_bytes_in_backward;
  timing["buffered_bytes_most"] = result.timing.buffered_bytes_most;
  timing["backward_s"] = result.timing.backward_s;
  timing["wait_s"] = result.timing.wait_s;
  nb::dict out = ToDict(result.result);
  out["timing"] = timing;
  out["tensors_received"] = result.received;
  return out;
}

// The step that EndStep closed, until its result is in.
class PendingStep {
 public:
  explicit PendingStep(std::future<absl::StatusOr<StepResult>> result) : result_(std::move(result)) {}

  // The result, again at every call; None when it is not in after `timeout_s`.
  std::optional<nb::dict> Wait(double timeout_s) {
    if (!arrived_) {
      nb::gil_scoped_release unlocked;
      if (result_.wait_for(std::chrono::duration<double>(timeout_s)) == std::future_status::ready) {
        arrived_ = result_.get();
      }
    }
    if (!arrived_) return std::nullopt;
    return DescribeStep(OrThrow(*arrived_));
  }

 private:
  std::future<absl::StatusOr<StepResult>> result_;
  std::optional<absl::StatusOr<StepResult>> arrived_;
};

// Weights on their way to where the caller wants them.
class Landing {
 public:
  explicit Landing(const std::vector<std::tuple<uint32_t, Address, uint64_t>>& places) {
    for (const auto& [tensor, address, bytes] : places) places_[tensor] = {address, bytes};
  }

  std::vector<uint32_t> tensors() const {
    std::vector<uint32_t> tensors;
    for (const auto& [tensor, place] : places_) tensors.push_back(tensor);
    return tensors;
  }

  absl::Status Write(uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece) {
    const auto found = places_.find(tensor);
    if (found == places_.end()) return absl::InternalError(absl::StrCat("tensor ", tensor, " was not asked for"));
    const auto [address, bytes] = found->second;
    if (offset + piece.size() > bytes) {
      return absl::InvalidArgumentError(absl::StrCat("pull of tensor ", tensor, ": the daemon serves at least ",
                                                     offset + piece.size(), " bytes, the destination has ", bytes));
    }
    std::copy(piece.begin(), piece.end(), reinterpret_cast<std::byte*>(address) + offset);
    return absl::OkStatus();
  }

 private:
  std::map<uint32_t, std::pair<Address, uint64_t>> places_;
};

// ballast::Client, and the process that it lives in: its threads do not survive a fork, so a child neither uses it nor
// takes it down.
class PyClient {
 private:
  // Ahead of their use: their return types are deduced.
  std::shared_ptr<Client> Open() const {
    if (!client_) throw StatusError(absl::FailedPreconditionError("the connection is closed"));
    if (getpid() == process_) return client_;
    throw StatusError(absl::FailedPreconditionError(absl::StrCat("this connection belongs to process ", process_,
                                                                 " and does not work in its fork ", getpid(),
                                                                 ": make the optimizer in the process that trains")));
  }
  // For calls that are not made by Ask: none that was left behind goes on beside them.
  std::shared_ptr<Client> Get() const {
    Open();  // first: a fork has no such call's thread to wait for
    calls_.AwaitLeft();
    return Open();
  }

  template <typename Call>
  auto Ask(Call call) const {
    return AskOrUndo(std::move(call), [](Client&) {});
  }
  // `undo`: of a call that succeeds although Ctrl-C ended the wait for it.
  template <typename Call, typename Undo>
  auto AskOrUndo(Call call, Undo undo) const {
    return calls_.Make([client = Open(), call = std::move(call)] { return call(*client); },
                       [client = Open(), undo] { undo(*client); });
  }

  // Asks again when the connection was dead: one lost while no call was open is found out by the next only. For calls
  // that may reach the daemon twice.
  template <typename Call>
  nb::dict AskForDict(Call call) const {
    auto answer = Ask(call);
    if (absl::IsUnavailable(answer.status())) answer = Ask(std::move(call));
    return ToDict(OrThrow(std::move(answer)));
  }

  // For those that are another the second time: a connection that was lost is made anew by ListRuns. `perhaps`: what
  // the caller does not know when the answer is lost.
  template <typename Call>
  nb::dict AskOnceForDict(Call call, const std::string& perhaps) const {
    OrThrow(Ask([](Client& client) { return client.ListRuns(); }));
    auto answer = Ask(std::move(call));
    if (!absl::IsUnavailable(answer.status())) return ToDict(OrThrow(std::move(answer)));
    throw StatusError(absl::UnavailableError(absl::StrCat(answer.status().message(), "; ", perhaps)));
  }

 public:
  using Groups = std::vector<std::map<std::string, double>>;

  static PyClient Connect(const std::string& server, double connect_timeout_s, double reconnect_timeout_s) {
    ClientOptions options{.server = server,
                          .connect_timeout_s = connect_timeout_s,
                          .reconnect_timeout_s = reconnect_timeout_s,
                          .interrupted = SignalRaised};
    auto client = InterruptibleCalls().Make([options] { return Client::Connect(options); }, [] {});
    return PyClient(OrThrow(std::move(client)));
  }

  PyClient(PyClient&&) = default;
  ~PyClient() { Close(); }
  void Close() {
    if (!client_) return;
    calls_.Forget();
    if (getpid() != process_) {
      new std::shared_ptr<Client>(std::move(client_));  // the parent's: never destroyed here
      return;
    }
    nb::gil_scoped_release unlocked;
    client_.reset();
  }

  std::string Server() const { return Get()->server(); }
  nb::dict GetServer() const {
    return AskForDict([](Client& client) { return client.GetServer(); });
  }
  nb::dict CreateRun(const std::string& spec_json) const {
    return ToDict(OrThrow(Ask([spec = ParseSpec(spec_json)](Client& client) { return client.CreateRun(spec); })));
  }
  nb::dict Plan(const std::string& spec_json) const {
    return AskForDict([spec = ParseSpec(spec_json)](Client& client) { return client.Plan(spec); });
  }
  nb::dict GetRun(const std::string& run_id) const {
    return ToDict(OrThrow(Ask([run_id](Client& client) { return client.GetRun(run_id); })));
  }
  nb::dict ListRuns() const {
    return ToDict(OrThrow(Ask([](Client& client) { return client.ListRuns(); })));
  }
  nb::dict DeleteRun(const std::string& run_id, bool force) const {
    return AskOnceForDict([run_id, force](Client& client) { return client.DeleteRun(run_id, force); },
                          absl::StrCat("run '", run_id, "' may have been deleted: see the list of runs"));
  }

  nb::dict Rewind(const std::string& run_id, std::optional<uint64_t> to_step, std::optional<uint32_t> steps_back,
                  const std::string& reason) const {
    v1::RewindRequest request;
    request.set_run_id(run_id);
    if (to_step) request.set_to_step(*to_step);
    if (steps_back) request.set_steps_back(*steps_back);
    request.set_reason(reason);
    return AskOnceForDict([request](Client& client) { return client.Rewind(request); },
                          absl::StrCat("run '", run_id, "' may have been rewound: see its status"));
  }

  nb::dict Attach(const std::string& run_id, uint32_t rank, uint32_t world, bool takeover, double wait_s,
                  const std::string& transport, double join_timeout_s) const {
    const LaneWish wish = transport == "grpc" ? LaneWish::kGrpc : transport == "shm" ? LaneWish::kShm : LaneWish::kAuto;
    AttachOptions options{.run_id = run_id, .rank = rank, .world = world, .takeover = takeover, .wait_s = wait_s};
    options.lane = wish;
    options.join_timeout_s = join_timeout_s;
    const Attachment attachment = OrThrow(AskOrUndo([options](Client& client) { return client.Attach(options); },
                                                    [](Client& client) { client.Detach(); }));
    nb::dict out;
    out["resume_step"] = attachment.resume_step;
    out["weights_loaded"] = attachment.weights_loaded;
    out["digests"] = nb::cast(attachment.digests);
    out["client_state"] = nb::bytes(attachment.client_state.data(), attachment.client_state.size());
    out["client_state_step"] = attachment.client_state_step;
    out["last_result"] = attachment.last_result ? nb::object(ToDict(*attachment.last_result)) : nb::object(nb::none());
    return out;
  }

  std::vector<uint64_t> LoadWeights(
      const std::vector<std::tuple<uint32_t, std::string, std::string, Address, uint64_t>>& slots,
      const std::map<uint32_t, uint64_t>& updates) const {
    std::vector<TensorView> views;
    for (const auto& [tensor, slot, format, address, bytes] : slots) {
      views.push_back({.tensor = tensor, .format = format, .bytes = Bytes(address, bytes), .slot = slot});
    }
    for (const auto& [tensor, count] : updates) {
      views.push_back({.tensor = tensor, .slot = "updates", .updates = count});
    }
    return UnlockedTransfer([&, client = Get()] { return client->LoadWeights(views); });
  }

  // Returns the step that the pulled weights are of, by tensor. `digests`, by tensor: what is here already is left out.
  std::map<uint32_t, uint64_t> Pull(const std::string& run_id,
                                    const std::vector<std::tuple<uint32_t, Address, uint64_t>>& places,
                                    const std::map<uint32_t, uint64_t>& digests) const {
    Landing landing(places);
    std::map<uint32_t, uint64_t> steps;
    const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t step) {
      steps[tensor] = step;
      return landing.Write(tensor, offset, piece);
    };
    const std::vector<uint32_t> tensors = landing.tensors();
    std::vector<uint64_t> have;
    for (const uint32_t tensor : tensors) {
      if (!digests.empty()) have.push_back(digests.at(tensor));
    }
    if (!tensors.empty())
      UnlockedTransfer([&, client = Get()] { return client->Pull(run_id, tensors, sink, 0, have); });
    return steps;
  }

  void BindWeights(uint32_t tensor, Address address, uint64_t bytes) const {
    OrThrow(
        Unlocked([&, client = Get()] { return client->BindWeights(tensor, reinterpret_cast<void*>(address), bytes); }));
  }

  void BeginStep(const Groups& groups, double loss_scale, uint32_t micro_batches) const {
    const StepValues values{.groups = MakeValues(groups), .loss_scale = loss_scale, .micro_batches = micro_batches};
    OrThrow(Unlocked([&, client = Get()] { return client->BeginStep(values); }));
  }

  void Push(uint32_t tensor, Address address, uint64_t bytes) const {
    OrThrow(Unlocked([&, client = Get()] { return client->Push(tensor, Bytes(address, bytes)); }));
  }

  void EndMicro(std::optional<double> loss, bool next_is_last) const {
    OrThrow(Unlocked([&, client = Get()] { return client->EndMicro(loss, next_is_last); }));
  }

  PendingStep EndStep(std::optional<double> loss, nb::bytes client_state, const Groups& groups) const {
    const StepEndValues values{.client_state = std::string(client_state.c_str(), client_state.size()),
                               .groups = MakeValues(groups)};
    PendingStep pending(Unlocked([&, client = Get()] { return client->EndStep(loss, values); }));
    pending.Wait(0);  // throws what refused the call: then the step goes on
    return pending;
  }

  bool AwaitWeights(uint32_t tensor, double timeout_s) const {
    return OrThrow(Unlocked([&, client = Get()] { return client->AwaitWeights(tensor, timeout_s); }));
  }

  uint64_t Step() const { return Get()->step(); }
  void CheckStatus() const { OrThrow(Get()->status()); }

 private:
  explicit PyClient(std::unique_ptr<Client> client) : client_(std::move(client)), process_(getpid()) {}

  static std::vector<GroupValues> MakeValues(const Groups& groups) {
    std::vector<GroupValues> values;
    for (const auto& group : groups) values.push_back(MakeGroupValues(group));
    return values;
  }

  static GroupValues MakeGroupValues(const std::map<std::string, double>& group) {
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

  std::shared_ptr<Client> client_;
  pid_t process_;
  mutable InterruptibleCalls calls_;
};

void BindClient(nb::module_& module) {
  using nb::arg;
  nb::class_<PyClient>(module, "Client")
      .def_static("connect", &PyClient::Connect, arg("server"), arg("connect_timeout_s"), arg("reconnect_timeout_s"))
      .def("close", &PyClient::Close)
      .def_prop_ro("server", &PyClient::Server)
      .def_prop_ro("step", &PyClient::Step)
      .def("check_status", &PyClient::CheckStatus)
      .def("get_server", &PyClient::GetServer)
      .def("create_run", &PyClient::CreateRun, arg("spec_json"))
      .def("plan", &PyClient::Plan, arg("spec_json"))
      .def("get_run", &PyClient::GetRun, arg("run_id"))
      .def("list_runs", &PyClient::ListRuns)
      .def("delete_run", &PyClient::DeleteRun, arg("run_id"), arg("force") = false)
      .def("rewind", &PyClient::Rewind, arg("run_id"), arg("to_step").none(), arg("steps_back").none(), arg("reason"))
      .def("attach", &PyClient::Attach, arg("run_id"), arg("rank"), arg("world"), arg("takeover"), arg("wait_s"),
           arg("transport") = "auto", arg("join_timeout_s") = AttachOptions().join_timeout_s)
      .def("load_weights", &PyClient::LoadWeights, arg("slots"), arg("updates") = std::map<uint32_t, uint64_t>())
      .def("pull", &PyClient::Pull, arg("run_id"), arg("places"), arg("digests") = std::map<uint32_t, uint64_t>())
      .def("bind_weights", &PyClient::BindWeights, arg("tensor"), arg("address"), arg("nbytes"))
      .def("begin_step", &PyClient::BeginStep, arg("groups"), arg("loss_scale") = 1.0, arg("micro_batches") = 1)
      .def("push", &PyClient::Push, arg("tensor"), arg("address"), arg("nbytes"))
      .def("end_micro", &PyClient::EndMicro, arg("loss").none(), arg("next_is_last") = false)
      .def("end_step", &PyClient::EndStep, arg("loss").none(), arg("client_state") = nb::bytes("", 0),
           arg("groups") = PyClient::Groups())
      .def("await_weights", &PyClient::AwaitWeights, arg("tensor"), arg("timeout_s"));
}

}  // namespace
}  // namespace ballast

NB_MODULE(_core, module) {
  namespace nb = nanobind;
  // What is still alive when the interpreter ends was closed before, by ballast.optimizer.
  nb::set_leak_warnings(false);
  ballast::RegisterStatusError();
  nb::class_<ballast::PendingStep>(module, "PendingStep")
      .def("wait", &ballast::PendingStep::Wait, nb::arg("timeout_s"));
  ballast::BindClient(module);
  ballast::BindNumerics(module);
  module.def(
      "digest",
      [](ballast::Address address, uint64_t bytes) {
        nb::gil_scoped_release unlocked;
        return ballast::WeightDigest(ballast::Bytes(address, bytes));
      },
      nb::arg("address"), nb::arg("nbytes"), "xxh3_64 of the bytes.");
  module.def(
      "served_digest",
      [](const std::string& master, const std::string& serving, const std::string& format, uint64_t elements,
         uint64_t columns, ballast::Address address) {
        const ballast::ServedAs tensor{
            .master = master, .serving = serving, .format = format, .elements = elements, .columns = columns};
        nb::gil_scoped_release unlocked;
        return ballast::ServedDigest(tensor, reinterpret_cast<const std::byte*>(address));
      },
      nb::arg("master"), nb::arg("serving"), nb::arg("format"), nb::arg("elements"), nb::arg("columns"),
      nb::arg("address"), "The daemon's digest of these weights, had they been uploaded.");
}
