#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

// Where there are several.
void AddDevices(const v1::GetServerResponse& server, Table* table) {
  if (server.devices_size() < 2) return;
  for (const v1::DeviceStatus& device : server.devices()) {
    const std::string failure = device.failure().empty() ? "" : absl::StrCat(", failed: ", device.failure());
    table->Row(
        {absl::StrCat("  ", device.device()), absl::StrCat(Bytes(device.memory_reserved_bytes()), " reserved of ",
                                                           Bytes(device.memory_limit_bytes()), failure)});
  }
}

int PrintStatus(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto server = (*client)->GetServer();
  if (!server.ok()) return Fail(invocation, server.status());
  if (invocation.json) return PrintJson(invocation, *server);
  const auto runs = (*client)->ListRuns();
  if (!runs.ok()) return Fail(invocation, runs.status());
  Table table({Table::kLeft, Table::kLeft});
  const std::string revision = server->revision().empty() ? "" : absl::StrCat(" (", server->revision(), ")");
  table.Row({"server", (*client)->server()});
  table.Row({"state", absl::StrCat(server->state(), ", up ", Duration(server->uptime_s()))});
  table.Row({"version", absl::StrCat(server->version(), revision, ", protocol ", server->protocol_min(), " to ",
                                     server->protocol_max())});
  table.Row({"device", server->device()});
  table.Row({"memory", absl::StrCat(Bytes(server->memory_reserved_bytes()), " reserved of ",
                                    Bytes(server->memory_limit_bytes()))});
  AddDevices(*server, &table);
  table.Row({"runs", absl::StrCat(runs->runs_size(), " of at most ", server->max_runs())});
  if (server->has_relay()) {
    const int above = server->relay().above_size();
    const std::string more =
        above > 0 ? absl::StrCat(", below ", above, above == 1 ? " more relay" : " more relays") : "";
    table.Row({"relay of", absl::StrCat(server->relay().upstream(), more)});
  }
  table.Row({"metrics", server->ops_address().empty()
                            ? "off"
                            : absl::StrCat(server->ops_tls() ? "https://" : "http://", server->ops_address())});
  table.Row({"rules", absl::StrJoin(server->rules(), ", ")});
  table.Row({"masters", absl::StrJoin(server->masters(), ", ")});
  table.Row({"states", absl::StrJoin(server->states(), ", ")});
  table.Print(invocation.out);
  return kOk;
}

}  // namespace

Command StatusCommand() {
  return {.name = "status",
          .arguments = {},
          .summary = "the daemon: version, device, memory",
          .details = "",
          .flags = {},
          .run = PrintStatus};
}

}  // namespace ballast::ctl
