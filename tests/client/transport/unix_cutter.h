// Cuts the connections of this process over the Unix sockets of the shared-memory transport, as the death of either end
// would.
#pragma once

#include <dirent.h>
#include <sys/socket.h>

#include <cstdlib>

namespace ballast {

// Returns how many ends were cut.
inline int CutSharedMemory() {
  int cut = 0;
  DIR* const open = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(open)) {
    const int fd = std::atoi(entry->d_name);
    int type = 0, listens = 0;
    socklen_t size = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_SEQPACKET) continue;
    size = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens != 0) continue;
    cut += shutdown(fd, SHUT_RDWR) == 0 ? 1 : 0;
  }
  closedir(open);
  return cut;
}

}  // namespace ballast
