// systemd's readiness protocol (sd_notify(3)) without libsystemd.
#pragma once

#include <string>
#include <string_view>

namespace ballast {

// state: "READY=1", "STOPPING=1". socket_path: $NOTIFY_SOCKET, "@..." for the abstract namespace; empty: nothing is
// done. False when the datagram could not be sent, which is no reason to stop.
bool SdNotify(const std::string& socket_path, std::string_view state);

}  // namespace ballast
