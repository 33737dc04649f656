# cmake -D FROM=descriptor_set -D TO=header -P embed_schema.cmake: bytes as a C++ array.
file(READ ${FROM} bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(................................................................................)" "\\1\n"
       bytes "${bytes}")
file(WRITE ${TO} "// Generated from ballast/v1/config.proto, comments included.\n#pragma once\n\n"
     "namespace ballast {\n\ninline constexpr unsigned char kConfigSchema[] = {\n${bytes}};\n\n}  // namespace ballast\n")
