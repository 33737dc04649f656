# Sourced by every script that is started by hand: what it takes on its command line, and how it says what is wrong.
# The script sets a variable to each flag's default, declares the flags, and calls parse_flags.
#
#   flag --NAME                  a flag without a value: parse_flags sets the variable NAME (dashes as underscores) to yes
#   flag --NAME WHAT [PATTERN]   a flag with a value, to which the variable is set. WHAT names what is wanted. PATTERN
#                                is a regular expression that the whole value matches (default: anything but nothing)
#   words anywhere | last        other words are taken too, and go to WORDS; last: the first of them ends the flags
#   parse_flags "$@"             sets the variables; --help prints the comment at the head of the script
#   usage                        prints that comment
#   refuse MESSAGE...            says that the command line is wrong; exits EXIT_REFUSED (default 2)
#   fail MESSAGE...              says that something else is wrong; exits EXIT_FAILED (default 1)
# shellcheck shell=bash

declare -A FLAG_WANTS=() FLAG_PATTERNS=()
declare -a WORDS=()
WORDS_ARE=refused # anywhere, last

fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit "${EXIT_FAILED:-1}"
}

refuse() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit "${EXIT_REFUSED:-2}"
}

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }

flag() {
  FLAG_WANTS[$1]=${2:-}
  FLAG_PATTERNS[$1]=${3:-.+}
}

words() { WORDS_ARE=$1; }

# FLAG [VALUE]
set_flag() {
  local flag_variable=${1#--}
  flag_variable=${flag_variable//-/_}
  if [[ -z ${FLAG_WANTS[$1]} ]]; then
    printf -v "$flag_variable" yes
  elif [[ ${2:-} != --* && ${2:-} =~ ^(${FLAG_PATTERNS[$1]})$ ]]; then
    printf -v "$flag_variable" '%s' "$2"
  else
    refuse "$1 wants ${FLAG_WANTS[$1]}, not '${2:-}'"
  fi
}

parse_flags() {
  while [[ $# -gt 0 ]]; do
    if [[ $1 == -h || $1 == --help ]]; then
      usage
      exit 0
    elif [[ $1 == --* && -n ${FLAG_PATTERNS[$1]:-} ]]; then
      set_flag "${@:1:2}"
      if [[ -n ${FLAG_WANTS[$1]} && $# -gt 1 ]]; then shift; fi
    elif [[ $1 == -* || $WORDS_ARE == refused ]]; then
      refuse "unknown flag '$1' (see --help)"
    elif [[ $WORDS_ARE == last ]]; then
      WORDS+=("$@")
      return
    else
      WORDS+=("$1")
    fi
    shift
  done
}
