# cmake -D FROM=file -D TO=header -D NAME=kName -P embed.cmake: the file's bytes as a C++ array.
file(READ ${FROM} bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(................................................................................)" "\\1\n"
       bytes "${bytes}")
get_filename_component(source ${FROM} NAME)
file(WRITE ${TO} "// Generated from ${source}.\n#pragma once\n\n"
     "namespace ballast {\n\ninline constexpr unsigned char ${NAME}[] = {\n${bytes}};\n\n}  // namespace ballast\n")
