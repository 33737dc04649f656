#include "client/python/core/runs.h"

#include <google/protobuf/util/json_util.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

namespace nb = nanobind;
namespace json = google::protobuf::util;

v1::RunSpec ParseSpec(const std::string& text) {
  v1::RunSpec spec;
  const auto status = json::JsonStringToMessage(text, &spec);
  if (!status.ok()) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat("the run's spec: ", std::string(status.message()))));
  }
  return spec;
}

nb::dict GetServer(const PyClient& self) {
  return self.AskForDict([](Client& client) { return client.GetServer(); });
}

nb::dict CreateRun(const PyClient& self, const std::string& spec_json) {
  return ToDict(OrThrow(self.Ask([spec = ParseSpec(spec_json)](Client& client) { return client.CreateRun(spec); })));
}

nb::dict AmendRun(const PyClient& self, const std::string& spec_json) {
  return ToDict(OrThrow(self.Ask([spec = ParseSpec(spec_json)](Client& client) { return client.AmendRun(spec); })));
}

nb::dict Plan(const PyClient& self, const std::string& spec_json) {
  return self.AskForDict([spec = ParseSpec(spec_json)](Client& client) { return client.Plan(spec); });
}

nb::dict GetRun(const PyClient& self, const std::string& run_id) {
  return ToDict(OrThrow(self.Ask([run_id](Client& client) { return client.GetRun(run_id); })));
}

nb::dict ListRuns(const PyClient& self) {
  return ToDict(OrThrow(self.Ask([](Client& client) { return client.ListRuns(); })));
}

nb::dict DeleteRun(const PyClient& self, const std::string& run_id, bool force, bool keep_checkpoints) {
  return self.AskOnceForDict(
      [run_id, force, keep_checkpoints](Client& client) { return client.DeleteRun(run_id, force, keep_checkpoints); },
      absl::StrCat("run '", run_id, "' may have been deleted: see the list of runs"));
}

nb::dict Checkpoint(const PyClient& self, const std::string& run_id) {
  return ToDict(OrThrow(self.Ask([run_id](Client& client) { return client.Checkpoint(run_id); })));
}

nb::dict ListCheckpoints(const PyClient& self, const std::string& run_id) {
  return ToDict(OrThrow(self.Ask([run_id](Client& client) { return client.ListCheckpoints(run_id); })));
}

nb::dict TagVersion(const PyClient& self, const std::string& run_id, const std::string& name, bool replace) {
  v1::TagVersionRequest request;
  request.set_run_id(run_id);
  request.set_name(name);
  request.set_replace(replace);
  return ToDict(OrThrow(self.Ask([request](Client& client) { return client.TagVersion(request); })));
}

void UntagVersion(const PyClient& self, const std::string& run_id, const std::string& name) {
  OrThrow(self.Ask([run_id, name](Client& client) -> absl::StatusOr<v1::UntagVersionResponse> {
    if (auto s = client.UntagVersion(run_id, name); !s.ok()) return s;
    return v1::UntagVersionResponse();
  }));
}

nb::dict ListVersions(const PyClient& self, const std::string& run_id) {
  return ToDict(OrThrow(self.Ask([run_id](Client& client) { return client.ListVersions(run_id); })));
}

nb::dict GetHistory(const PyClient& self, const std::string& run_id, uint64_t after_step) {
  return ToDict(OrThrow(self.Ask([=](Client& client) { return client.GetHistory(run_id, after_step); })));
}

nb::dict Rewind(const PyClient& self, const std::string& run_id, std::optional<uint64_t> to_step,
                std::optional<uint32_t> steps_back, const std::string& reason) {
  v1::RewindRequest request;
  request.set_run_id(run_id);
  if (to_step) request.set_to_step(*to_step);
  if (steps_back) request.set_steps_back(*steps_back);
  request.set_reason(reason);
  return self.AskOnceForDict([request](Client& client) { return client.Rewind(request); },
                             absl::StrCat("run '", run_id, "' may have been rewound: see its status"));
}

}  // namespace

void BindRuns(nb::class_<PyClient>& client) {
  using nb::arg;
  client.def("get_server", &GetServer)
      .def("create_run", &CreateRun, arg("spec_json"))
      .def("amend_run", &AmendRun, arg("spec_json"))
      .def("plan", &Plan, arg("spec_json"))
      .def("get_run", &GetRun, arg("run_id"))
      .def("list_runs", &ListRuns)
      .def("get_history", &GetHistory, arg("run_id"), arg("after_step"))
      .def("delete_run", &DeleteRun, arg("run_id"), arg("force") = false, arg("keep_checkpoints") = false)
      .def("checkpoint", &Checkpoint, arg("run_id"))
      .def("list_checkpoints", &ListCheckpoints, arg("run_id"))
      .def("tag_version", &TagVersion, arg("run_id"), arg("name"), arg("replace") = false)
      .def("untag_version", &UntagVersion, arg("run_id"), arg("name"))
      .def("list_versions", &ListVersions, arg("run_id"))
      .def("rewind", &Rewind, arg("run_id"), arg("to_step").none(), arg("steps_back").none(), arg("reason"));
}

}  // namespace ballast
